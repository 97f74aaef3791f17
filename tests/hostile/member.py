"""A real peer that turns hostile: `python -m tests.hostile.member MODE ROUND` and then what `dilocox-peer` takes.

It is honest until it has certified ROUND rounds, counted from when it came in; then it is one of machines.MODES or of
CONTRIBUTIONS, or "honest".
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilocox_peer.compression.codec import CodecPolicy
from dilocox_peer.compression.contribution import encode_contribution, open_contribution
from dilocox_peer.compression.reader import PIECE
from dilocox_peer.peer import averaging
from dilocox_peer.peer.averaging import Averaging
from dilocox_peer.peer.training import trainer
from dilocox_peer.peer.training.outer import OuterOptimizer, OwnContribution
from dilocox_peer.store.shelf import FileContent, Shelf
from dilocox_peer.types import Digest, Layout

from .machines import MODES

STALL_S = 60.0
SWOLLEN = 1000.0


def swollen(offer: OwnContribution, layout: Layout) -> OwnContribution:
    """What it has trained, a thousand times."""
    return _times(SWOLLEN, offer, layout)


def turned(offer: OwnContribution, layout: Layout) -> OwnContribution:
    """What it has trained, turned round and as long as passes unclipped."""
    return _times(-4.0, offer, layout)


def _times(factor: float, offer: OwnContribution, layout: Layout) -> OwnContribution:
    contribution, flat_N = open_contribution(offer.blob, layout), torch.empty(layout.num_elements)
    for start, stop, values in contribution.decode_into(torch.empty(PIECE)):
        flat_N[start:stop] = factor * values
    codecs = {spec.name: codec for spec, codec in zip(layout.tensors, contribution.codecs, strict=True)}
    return replace(offer, blob=memoryview(encode_contribution(layout, flat_N, lambda spec: codecs[spec.name])))


def garbled(offer: OwnContribution, layout: Layout) -> OwnContribution:
    """One byte short."""
    return replace(offer, blob=offer.blob[:-1])


CONTRIBUTIONS: dict[str, Callable[[OwnContribution, Layout], OwnContribution]] = {
    "swells": swollen,
    "turns": turned,
    "garbles": garbled,
}


def _offer_otherwise(change: Callable[[OwnContribution, Layout], OwnContribution], after_round: int) -> None:
    """The machine is an honest one's; what it offers is not."""

    class Changed(OuterOptimizer):
        def offer(
            self, snapshot_N: Tensor, micro_batches: int, *, codec_of: CodecPolicy | None = None, sliced: bool = False
        ) -> OwnContribution:
            offer = super().offer(snapshot_N, micro_batches, codec_of=codec_of, sliced=sliced)
            return change(offer, self.state.layout) if self.state.round >= after_round else offer

    trainer.OuterOptimizer = Changed  # type: ignore[attr-defined]


def turn(mode: str, after_round: int) -> None:
    """What this process makes of its rounds from now on."""
    if mode == "honest":
        return

    def has_turned(machine: Any) -> bool:
        return bool(machine.round >= after_round)

    if mode in CONTRIBUTIONS:
        _offer_otherwise(CONTRIBUTIONS[mode], after_round)
        return
    averaging.RoundMachine = type("Turned", (MODES[mode],), {"has_turned": property(has_turned)})  # type: ignore[attr-defined,assignment]
    if mode == "hangs":
        begin, content = Averaging.serve, Shelf.content
        turned: list[Averaging] = []

        async def begin_and_be_known(self: Averaging) -> None:
            turned.append(self)
            await begin(self)

        def hang(self: Shelf, name: Digest) -> FileContent | None:
            found = content(self, name)
            if found is not None and any(has_turned(each.machine) for each in turned):
                time.sleep(STALL_S)  # of a thread that serves
            return found

        Averaging.serve = begin_and_be_known  # type: ignore[method-assign]
        Shelf.content = hang  # type: ignore[method-assign]


if __name__ == "__main__":
    given_mode, given_round = sys.argv[1:3]
    del sys.argv[1:3]
    turn(given_mode, int(given_round))
    from dilocox_peer.__main__ import main

    main()
