"""Claiming a stage where all places are taken."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox_peer.cli.service import unit
from dilocox_peer.config import preset
from dilocox_peer.dht.assignment import nearest
from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import ConfigError, LackedForNow, PeerUnavailable
from dilocox_peer.events import Remark
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer import claim as claiming
from dilocox_peer.peer.claim import claim_stage
from dilocox_peer.peer.settings import Wish
from dilocox_peer.types import PeerId
from tests.virtual_loop import run_virtually

ME = PeerId("me")


class Directory:
    def __init__(self, peers: list[str]) -> None:
        self._leases = [Lease(PeerId(name), 0, 1, (), 1, 1.0, 0, "direct", 0) for name in peers]

    async def peers(self, stage: int) -> list[Lease]:
        return [lease for lease in self._leases if lease.stage == stage]


async def claim(
    mode: str, peers: list[str], *, held: int | None = None, device: str = "cpu", allowed: int | None = None
) -> tuple[int, list[Any]]:
    manifest: Manifest = preset("tiny", limits={"max_peers": 2}, admission={"mode": mode})
    transport = SimpleNamespace(addresses=("/ip4/127.0.0.1/tcp/1/p2p/x",))
    presence = SimpleNamespace(me=ME, transport=transport, is_dialable=True)
    told: list[Any] = []
    directory = cast("Any", Directory(peers))
    stage = await claim_stage(
        manifest,
        Wish(None, device, allowed),
        presence=cast("Any", presence),
        directory=directory,
        listener=told.append,
        held=held,
    )
    return stage, told


async def test_who_was_invited_to_a_full_run_is_refused_with_what_to_do() -> None:
    with pytest.raises(LackedForNow, match=r"stage 0 has its 2 peers, .*join another run"):
        await claim("invite", ["a", "b"])


async def test_made_up_leases_keep_nobody_out_of_an_open_run() -> None:
    stage, told = await claim("open", ["a", "b"])
    assert stage == 0
    assert [type(event) for event in told] == [Remark]
    assert "join another run" in told[0].line()


@pytest.mark.parametrize(("peers", "held"), [(["a"], None), (["a", "me"], None), (["a", "b"], 0)])
async def test_who_has_a_place_or_finds_one_hears_nothing(peers: list[str], held: int | None) -> None:
    assert await claim("invite", peers, held=held) == (0, [])


@pytest.mark.parametrize(("free", "taken", "fits"), [(2**33, 0, True), (2**28, 0, False), (2**28, 2**33, True)])
async def test_a_card_without_room_is_named_with_what_to_do(
    free: int, taken: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """taken: by this peer itself, for the stage that it holds."""
    monkeypatch.setattr(claiming, "chosen_device", lambda name: name)
    monkeypatch.setattr(claiming, "free_on", lambda device: free)
    monkeypatch.setattr(claiming, "taken_on", lambda device: taken)
    monkeypatch.setattr(claiming, "whole_of", lambda device: 2**28)
    if fits:
        assert await claim("open", [], device="cuda:1") == (0, [])
        return
    with pytest.raises(
        ConfigError, match=r"stage 0 needs .* of a card's memory, .* are free on cuda:1: close .*--device"
    ):
        await claim("open", [], device="cuda:1")


@pytest.mark.parametrize(
    ("whole", "allowed", "kind"),
    [
        (2**36, None, LackedForNow),
        (2**27, None, ConfigError),
        (2**36, 10**8, ConfigError),
        (2**36, 2**36, LackedForNow),
    ],
)
async def test_memory_that_others_hold_is_lacking_for_now_and_what_there_is_none_of_for_good(
    whole: int, allowed: int | None, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claiming, "available_memory", lambda: 10**8)
    monkeypatch.setattr(claiming, "resident_bytes", lambda: 0)
    monkeypatch.setattr(claiming, "whole_memory", lambda: whole)
    with pytest.raises(kind, match="stage 0 needs "):
        await claim("open", [], allowed=allowed)


class Swarm(Directory):
    """Three peers of each of two stages, and made-up leases of stage 1; its own transport."""

    addresses = ("/ip4/203.0.113.9/tcp/1/p2p/x",)

    def __init__(self, shams: int) -> None:
        names = [(f"{stage}-{number}", stage) for stage in (0, 1) for number in range(3)]
        names += [(f"sham{number}", 1) for number in range(shams)]
        self._leases = [Lease(PeerId(name), stage, 1, (), 1, 1.0, 0, "direct", 0) for name, stage in names]

    async def announce(self, lease: Lease) -> None:
        self._leases = [each for each in self._leases if each.peer != lease.peer] + [lease]

    async def leave(self) -> None:
        self._leases = [each for each in self._leases if each.peer != ME]

    async def connect(self, peer: PeerId, addresses: object, timeout_s: float) -> None:
        if peer.startswith("sham"):
            raise PeerUnavailable(peer, "nobody there")

    async def fetch(self, *_: object, **__: object) -> None:
        """Everybody answers at once."""


async def chosen(swarm: Swarm, incarnation: int, mode: str) -> int:
    presence = SimpleNamespace(
        me=ME,
        transport=swarm,
        is_dialable=True,
        incarnation=incarnation,
        site="",
        reachability=SimpleNamespace(at=lambda _addresses: "relayed"),
        lease=lambda stage: Lease(ME, stage, incarnation, (), 1, 0.0, 0, "direct", 0),
    )
    return await claim_stage(
        preset("tiny", stages={"count": 2}, admission={"mode": mode}),
        Wish(None, "cpu", None),
        presence=cast("Any", presence),
        directory=cast("Any", swarm),
        listener=lambda _event: None,
    )


async def test_leases_of_peers_that_do_not_answer_keep_nobody_from_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """All went to stage 0. Of a run of the invited leases are no stranger's words."""
    monkeypatch.setattr(claiming, "CLAIM_WAIT_S", 0.001)
    went = [await chosen(Swarm(32), incarnation, "open") for incarnation in range(2, 26)]
    assert 6 <= sum(went) <= 24
    assert [await chosen(Swarm(32), incarnation, "invite") for incarnation in range(2, 6)] == [0] * 4


@pytest.mark.parametrize(
    ("reached_s", "answers_s", "is_there"),
    [(1.5, 0.9, True), (6.0, 0.5, True), (1.5, 2.0, True), (2.0, 60.0, True), (9.0, 0.5, False)],
)
def test_homes_that_need_seconds_to_be_reached_by_way_of_relays_are_there(
    reached_s: float, answers_s: float, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their stage counted as empty, and every newcomer went there."""

    class Homes:
        async def connect(self, *_: Any) -> None:
            await asyncio.sleep(reached_s)

        async def fetch(self, *_: Any, **__: Any) -> None:
            await asyncio.sleep(answers_s)

    addresses = ("/ip4/198.51.100.1/tcp/1/p2p/relay/p2p-circuit/p2p/home",)
    homes = [Lease(PeerId(name), 0, 1, addresses, 1, 1.0, 0, "relayed", 0) for name in ("a", "b")]
    presence = cast("Any", SimpleNamespace(me=ME, transport=Homes(), incarnation=1))

    async def asked() -> None:
        found = await claiming.ask_peers(presence, {0: homes})
        assert {peer: seconds is not None for peer, seconds in found.items()} == {"a": is_there, "b": is_there}
        assert not nearest({peer: seconds for peer, seconds in found.items() if seconds is not None})

    run_virtually(asked(), monkeypatch)


@pytest.mark.parametrize("kind", [LackedForNow, ConfigError])
def test_what_no_service_tries_again_ends_with_another_code(kind: type[LackedForNow | ConfigError]) -> None:
    given_up = "RestartPreventExitStatus=2 4"
    units = [
        unit("a", ["join"], {}),
        *(path.read_text() for path in (Path(__file__).parents[2] / "deploy/systemd").glob("*.service")),
    ]
    assert len(units) == 3
    assert all(given_up in each for each in units)
    assert (str(kind.exit_code) in given_up.partition("=")[2].split()) == (kind is ConfigError)
