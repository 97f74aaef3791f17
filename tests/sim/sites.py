"""Peers at several sites: fast between those of one, slow between sites. How many micro-batches cross?"""

from collections import Counter
from dataclasses import dataclass

from dilocox_peer.types import PeerId
from dilocox_peer.wire.hops import HopMessage, Step

from .pipeline_world import Node, PipelineWorld, Settings, share_of_ideal


@dataclass(frozen=True, slots=True)
class Sited:
    """share: of the ideal. crossed: of the bodies of Steps, the share that went from one site to another."""

    share: float
    crossed: float


class _Sites(PipelineWorld):
    def __init__(self, seed: int, settings: Settings, site_of: dict[PeerId, int], line_bps: float) -> None:
        super().__init__(seed, settings)
        self.site_of = site_of
        self.line_bps = line_bps
        self.sent: Counter[bool] = Counter()

    def is_crossing(self, pair: frozenset[PeerId]) -> bool:
        return len({self.site_of[peer] for peer in pair}) > 1

    def rate_bps(self, pair: frozenset[PeerId]) -> float:
        return self.line_bps if self.is_crossing(pair) else super().rate_bps(pair)

    def deliver(self, sender: Node, to: PeerId, message: HopMessage, body: object) -> None:
        if isinstance(message, Step):
            self.sent[self.is_crossing(frozenset((sender.peer, to)))] += 1
        super().deliver(sender, to, message, body)


def at_sites(
    seed: int,
    layout: tuple[int, ...],
    sites: list[list[int]],
    *,
    line_bps: float = 2.3e6,
    latency_s: float = 0.001,
    named: bool = False,
    measure_s: float = 60.0,
) -> Sited:
    """sites: of each stage, the site of each of its peers. named: their volunteers say where they are."""
    settings = Settings(layout, latency_s=latency_s, body_bytes=256 * 1024, accumulate=8)
    names = {
        PeerId(f"s{stage}r{number:02d}"): site
        for stage, row in enumerate(sites)
        for number, site in enumerate(row)
    }  # fmt: skip
    world = _Sites(seed, settings, names, line_bps)
    if named:
        world.site_names = {peer: f"site{site}" for peer, site in names.items()}
    world.start()
    share = share_of_ideal(world, warm_up_s=5.0, measure_s=measure_s)
    return Sited(share, world.sent[True] / world.sent.total())
