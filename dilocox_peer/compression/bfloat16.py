"""Magnitudes on the wire: bfloat16, little-endian, 0 or within 2**-100 .. 2**112.

bfloat16 and not float16, as pseudo-gradients and their residuals range over more than float16 does. The limits keep decoders away
from denormals (which some machines flush to 0) and from infinity.
"""

import numpy as np
import numpy.typing as npt

from dilocox_peer.errors import MalformedBlob

MAX_MAGNITUDE = 2.0**112
"""Larger inputs are clamped: the sum of a block, and the sum of 64 decoded contributions, stay finite in float32."""

MIN_MAGNITUDE = 2.0**-100
"""Smaller ones are 0, the elements all stay in the residual."""

_MAX_BITS = int(np.float32(MAX_MAGNITUDE).view(np.uint32)) >> 16
_MIN_BITS = int(np.float32(MIN_MAGNITUDE).view(np.uint32)) >> 16
_NAN_BITS = 0x7FC0


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Bits of values >= 0 rounded to the nearest, within the limits; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = np.where(rounded < _MIN_BITS, 0, np.minimum(rounded, _MAX_BITS))
    return np.where(np.isnan(values), _NAN_BITS, rounded).astype(np.uint16)


def from_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The numbers, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def check_magnitudes(codec: str, bits: npt.NDArray[np.uint16]) -> None:
    """Raises MalformedBlob unless every one is 0 or within the limits. Bits of floats >= 0 order like the floats."""
    wrong = (bits > _MAX_BITS) | ((bits != 0) & (bits < _MIN_BITS))
    if wrong.any():
        value = float(from_bfloat16(bits[wrong][:1])[0])
        allowed = f"0 and {MIN_MAGNITUDE:.1e} to {MAX_MAGNITUDE:.1e}"
        raise MalformedBlob(f"{codec}: a magnitude of {value}; allowed are {allowed}")
