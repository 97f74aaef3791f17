"""A real peer that turns hostile: `python -m tests.hostile.member MODE ROUND` and then what `dilocox-peer` takes.

It is honest until it has certified ROUND rounds, counted from when it came in; then it is one of machines.MODES or of
CONTRIBUTIONS, or "honest".
"""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilocox_peer.compression.codec import CodecPolicy
from dilocox_peer.compression.contribution import encode_contribution, open_contribution
from dilocox_peer.network.transport import Reply
from dilocox_peer.peer import averaging
from dilocox_peer.peer.averaging import Averaging
from dilocox_peer.peer.training import trainer
from dilocox_peer.peer.training.outer import Offer, OuterOptimizer
from dilocox_peer.types import Layout, PeerId

from .machines import MODES

STALL_S = 3600.0
SWOLLEN = 1000.0


def swollen(offer: Offer, layout: Layout) -> Offer:
    """What it has trained, a thousand times."""
    contribution, flat_N = open_contribution(offer.blob, layout), torch.empty(layout.num_elements)
    for _spec, start, stop, values in contribution.decode_into(torch.empty(layout.num_elements)):
        flat_N[start:stop] = SWOLLEN * values
    codecs = {spec.name: codec for spec, codec in zip(layout.tensors, contribution.codecs, strict=True)}
    return replace(offer, blob=encode_contribution(layout, flat_N, lambda spec: codecs[spec.name]))


def garbled(offer: Offer, layout: Layout) -> Offer:
    """One byte short."""
    return replace(offer, blob=offer.blob[:-1])


CONTRIBUTIONS: dict[str, Callable[[Offer, Layout], Offer]] = {"swells": swollen, "garbles": garbled}


def _offer_otherwise(change: Callable[[Offer, Layout], Offer], after_round: int) -> None:
    """The machine is an honest one's; what it offers is not."""

    class Changed(OuterOptimizer):
        def offer(self, snapshot_N: Tensor, micro_batches: int, *, codec_of: CodecPolicy | None = None) -> Offer:
            offer = super().offer(snapshot_N, micro_batches, codec_of=codec_of)
            return change(offer, self.state.layout) if self.state.round >= after_round else offer

    trainer.OuterOptimizer = Changed  # type: ignore[misc]


def turn(mode: str, after_round: int) -> None:
    """What this process makes of its rounds from now on."""
    if mode == "honest":
        return

    def has_turned(machine: Any) -> bool:
        return bool(machine.round >= after_round)

    if mode in CONTRIBUTIONS:
        _offer_otherwise(CONTRIBUTIONS[mode], after_round)
        return
    averaging.RoundMachine = type("Turned", (MODES[mode],), {"has_turned": property(has_turned)})  # type: ignore[misc]
    if mode == "hangs":
        serve = Averaging._serve_blob

        async def hang(self: Averaging, peer: PeerId, header: dict[str, Any]) -> Reply:
            if has_turned(self.machine):
                await asyncio.sleep(STALL_S)
            return await serve(self, peer, header)

        Averaging._serve_blob = hang  # type: ignore[method-assign]


if __name__ == "__main__":
    given_mode, given_round = sys.argv[1:3]
    del sys.argv[1:3]
    turn(given_mode, int(given_round))
    from dilocox_peer.__main__ import main

    main()
