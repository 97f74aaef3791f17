"""Frozen matrices in 8 or 4 bits, by bitsandbytes: a volunteer's choice, to hold a larger model beside its adapters.

The run's frozen weights are what they are, named by their hash; a peer that keeps them so computes with what its library makes of them
(of 8 bits 1 %, of 4 (NF4) 9 % away from the weights), as QLoRA does (arXiv 2305.14314). They are widened when they are used, one at a time.
Embeddings, head and vectors stay as they are.
"""

import logging
from typing import Any, Final

import torch
from torch import Tensor

from dilocox_peer.errors import ConfigError
from dilocox_peer.extras import pip_install

_BLOCKS: Final = {8: 256, 4: 64}  # values that share a float32 scale


def bytes_of(num_elements: int, bits: int) -> int:
    """Of a matrix with its scales."""
    return num_elements * bits // 8 + 4 * (num_elements // _BLOCKS[bits] + 1)


def library() -> Any:
    """bitsandbytes.functional. Raises ConfigError where it is not installed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it tells of kernels that it would download
    try:
        from bitsandbytes import functional
    except (ImportError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"--base-bits needs bitsandbytes ({reason}): `{pip_install('quantized')}`, or leave it out"
        ) from None
    finally:
        logging.disable(before)
    return functional


class QuantizedMatrix:
    """A matrix that has no gradient, on the device of the one it was made of."""

    def __init__(self, weight_OI: Tensor, bits: int) -> None:
        assert bits in _BLOCKS, f"{bits} bits"
        self.shape = weight_OI.shape
        self._functional = library()
        self._bits = bits
        if bits == 4:
            self._packed, self._state = self._functional.quantize_4bit(
                weight_OI, blocksize=_BLOCKS[4], quant_type="nf4"
            )
        else:
            self._packed, self._state = self._functional.quantize_blockwise(weight_OI, blocksize=_BLOCKS[8])

    @property
    def nbytes(self) -> int:
        return int(self._packed.nbytes + self._state.absmax.nbytes)

    def to(self, dtype: torch.dtype) -> Tensor:
        """Widened: a new tensor."""
        widen = self._functional.dequantize_4bit if self._bits == 4 else self._functional.dequantize_blockwise
        widened: Tensor = widen(self._packed, self._state)
        return widened.to(dtype)
