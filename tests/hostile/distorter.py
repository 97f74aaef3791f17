"""A peer of a stage that lies to its neighbours: `python -m tests.hostile.distorter WHAT TIMES AFTER` and then what `dilocox-peer` takes.

WHAT: "gradient", to those before it, or "activations", to those behind it. After so many micro-batches it sends each TIMES as strong as it
was computed; all else it does as an honest peer does.
"""

import sys
from typing import Any

from torch import Tensor

from dilocox_peer.model.activations import BodyFormat


def distort(what: str, times: float, after: int) -> None:
    pack, count = BodyFormat.pack_hidden, 0

    def packed(self: BodyFormat, hidden_BTD: Tensor) -> bytes:
        nonlocal count
        count += 1
        is_gradient = not hidden_BTD.requires_grad  # what a forward gives has a graph behind it
        lies = count > after and is_gradient == (what == "gradient")
        return pack(self, hidden_BTD * times if lies else hidden_BTD)

    patched: Any = BodyFormat
    patched.pack_hidden = packed


def main() -> None:
    from dilocox_peer.__main__ import main as run

    what, times, after = sys.argv[1:4]
    distort(what, float(times), int(after))
    del sys.argv[1:4]
    run()


if __name__ == "__main__":
    main()
