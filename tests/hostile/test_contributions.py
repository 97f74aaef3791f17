"""Real processes: one member of three offers what no mean should take as it is, and the others say who, and why.

Asked of each honest peer: its event log, its status over the control socket, and the dashboard drawn from its own events.
"""

import asyncio
from typing import Any

import pytest

from dilocox_peer.cli.eventlog import read_event
from dilocox_peer.cli.operate import peer_lines
from dilocox_peer.cli.screen import Size, render
from dilocox_peer.compression.aggregate import MAX_LATE_SCALE
from dilocox_peer.config import preset
from dilocox_peer.events import short
from dilocox_peer.peer.control import ask, socket_path
from dilocox_peer.peer.status import Status
from dilocox_peer.types import PeerId
from tests.swarm.watched import LONG_S, Watched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

TURN_AFTER = 1
HONEST = ("honest0", "honest1")
TIMES = 2  # that each of them is to say it


async def play(mode: str, event: str) -> tuple[Watched, dict[str, dict[str, Any]]]:
    """The swarm when every honest peer has told of it so often, and then what each says of itself when it is asked."""
    rounds = {"total": 10_000, "inner_steps": 16, "start_peers": 3}
    async with Watched(preset("tiny", rounds=rounds)) as swarm:
        await swarm.start_bootstrap()
        program = ("-m", "tests.hostile.member", mode, str(TURN_AFTER))
        peers = await asyncio.gather(
            *(swarm.start_peer(label) for label in HONEST), swarm.start_peer("hostile", program=program)
        )
        await swarm.until(lambda: all(len(swarm.of(label, event)) >= TIMES for label in HONEST), peers, 2 * LONG_S)
        homes = {label: socket_path(swarm.folder / "peers" / label) for label in HONEST}
        return swarm, {label: (await ask(home, "status"))["status"] for label, home in homes.items()}


def picture_of(swarm: Watched, label: str) -> str:
    """The dashboard that its events give."""
    status, at_s = Status(), 0.0
    for record in swarm.events[label]:
        if (known := read_event(record)) is not None:
            status.take(*known)
            at_s = known[1]
    lines = render(status, Size(120, 40), at_s).lines
    return "\n".join("".join(text for text, _style in line) for line in lines)


@pytest.mark.parametrize(
    ("mode", "event", "key", "word", "mark"),
    [
        ("swells", "ContributionClipped", "contributions_clipped", "clipped", "⇣1"),
        ("turns", "ContributionClipped", "contributions_clipped", "left out", "⇣1"),
        ("garbles", "ContributionRefused", "contributions_refused", "refused", "✖1"),
    ],
)
def test_who_offers_too_much_or_nonsense_is_named_with_the_reason(
    mode: str, event: str, key: str, word: str, mark: str
) -> None:
    swarm, said = asyncio.run(play(mode, event))
    hostile = PeerId(swarm.of("hostile", "PeerStarted")[0]["peer"])
    for label in HONEST:
        told = swarm.of(label, event)
        assert {each["peer"] for each in told} == {hostile}, f"{label} names it and nobody else"
        [in_status] = said[label][key]
        assert in_status["peer"] == hostile
        if mode == "swells":
            assert all(each["norm"] > 100 * each["median_norm"] > 0 and each["factor"] < 0.1 for each in told)
            limit = (
                4 * MAX_LATE_SCALE * in_status["median_norm"]
            )  # limits.norm_clip, for the one with most micro-batches
            assert in_status["norm"] * in_status["factor"] <= limit
            why = f"the group's median {in_status['median_norm']:.3g}"
        elif mode == "turns":
            assert all(each["factor"] == 0.0 for each in told)
            why = "does not agree with most of the others"
        else:
            why = "its header announces"
            assert all(why in each["reason"] for each in told)
            assert why in in_status["reason"]
            rounds = {each["round"] for each in told}
            certified = [each for each in swarm.of(label, "RoundCertified") if each["round"] in rounds]
            assert not any(hostile in each["contributors"] for each in certified)
        [line] = [line for line in peer_lines(said[label]) if f"contributions {word}" in line]
        assert short(hostile) in line
        assert why in line
        picture = picture_of(swarm, label)
        assert f"contribution of {short(hostile)} to round" in picture
        assert mark in picture
