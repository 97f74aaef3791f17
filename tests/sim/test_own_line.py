"""An origin whose own line is down now and then: its callees have done nothing, and are asked as before when it is back."""

from functools import partial

import pytest

from dilocox_peer.types import PeerId
from dilocox_peer.wire.hops import HopMessage

from .pipeline_world import Node, PipelineWorld, Settings

LAYOUT, SPEEDS = (1, 3), (1.0, 0.3, 0.3, 0.3)  # all three callees together are as fast as it
LINK_LOST_S = 15.0  # without a word


class _Line(PipelineWorld):
    """What goes over the line while it is down comes late, or with its link not at all."""

    up_at = 0.0
    num_lost = 0  # times that its links were lost

    def deliver(self, sender: Node, to: PeerId, message: HopMessage, body: object) -> None:
        if self.now < self.up_at:
            self.at(self.up_at + 0.01, partial(self._late, self.num_lost, sender, to, message, body))
        else:
            super().deliver(sender, to, message, body)

    def _late(self, num_lost: int, sender: Node, to: PeerId, message: HopMessage, body: object) -> None:
        if num_lost == self.num_lost:
            self.deliver(sender, to, message, body)

    def cut(self, seconds: float) -> None:
        self.up_at = self.now + seconds
        if seconds > LINK_LOST_S:
            origin = self.stages[0][0]
            self.at(self.now + LINK_LOST_S, partial(self._lose, origin))
            self.at(self.up_at + 0.01, partial(self.link_all, origin))

    def _lose(self, origin: Node) -> None:
        self.num_lost += 1
        for peer in sorted(origin.links):
            self.unlink(origin, self.nodes[peer])


@pytest.mark.parametrize(("down_s", "every_s", "least"), [(8.0, 50.0, 0.8), (20.0, 300.0, 0.85)])
def test_outages_of_ones_own_line_cost_no_more_than_they_last(down_s: float, every_s: float, least: float) -> None:
    """All callees but one were left alone, for longer each time: half of the work of ten minutes."""
    world = _Line(1, Settings(LAYOUT, accumulate=8, latency_s=0.02, service_s=0.5, speeds=SPEEDS))
    world.start()
    world.run(60.0)
    before = world.completed()
    world.run(160.0)
    rate = (world.completed() - before) / 100.0
    shares = []
    for _ in range(int(1500.0 / every_s)):
        began, before = world.now, world.completed()
        world.cut(down_s)
        world.run(began + every_s)
        shares.append((world.completed() - before) / every_s / rate)
    latest = shares[len(shares) // 2 :]
    assert sum(latest) / len(latest) > least, shares
