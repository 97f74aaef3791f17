"""What is served of whole states, and how another's is fetched: by its digest, from all that have it."""

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_peer.errors import ProtocolError
from dilocox_peer.events import Event
from dilocox_peer.events_of_states import StateFetched, StateFetchFailed
from dilocox_peer.peer.state.checkpoint import write_checkpoint
from dilocox_peer.peer.state.statesync import Agreed, States, fetch_state
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.store.store import Content, Store
from dilocox_peer.types import Digest, Layout, PeerId
from tests.certified_stage import MANIFEST, CertifiedStage
from tests.unit.test_store import ME, Loopback

ASKER = PeerId("asker")
LARGE = Layout.of([("weight", (700, 500)), ("bias", (3,))])  # two parts of 1.4 MB: three chunks


def large_state(value: float = 1.0) -> AnchorState:
    import numpy as np

    anchor = np.arange(LARGE.num_elements, dtype="<f4") * value
    return AnchorState.of(LARGE, head=Digest(b"h" * 32), round_number=7, anchor=anchor.data, momentum=(2 * anchor).data)


class Gives:
    """A source of one state, whatever is asked for."""

    def __init__(self, state: AnchorState) -> None:
        self._state = state

    def content(self, _name: Digest) -> Content:
        return self._state


class Donors:
    def __init__(self, tmp_path: Path) -> None:
        self.net, self._folder, self.told = Loopback(), tmp_path, list[Event]()

    async def donor(self, name: str, state: AnchorState) -> PeerId:
        peer = PeerId(name)
        await Store(self.net.at(peer), [Shelf(self._folder / name)], sources=[Gives(state)]).serve()
        return peer

    async def fetch(
        self, state: AnchorState, donors: Sequence[PeerId], *, shelf: Shelf | None = None, spared: Digest | None = None
    ) -> AnchorState | None:
        agreed = Agreed(state.round, state.head, state.digest)
        return await fetch_state(
            self.net.at(ME),
            donors,
            agreed,
            layout=state.layout,
            timeout_s=20.0,
            listener=self.told.append,
            shelf=shelf,
            spared=spared,
        )


async def test_the_newest_and_those_on_disk_are_served_by_their_digests_and_no_other(tmp_path: Path) -> None:
    stage = CertifiedStage().rounds(4)
    for state in stage.states[:-1]:
        write_checkpoint(tmp_path, MANIFEST.run_id, state, keep=100)
    states = States(lambda: stage.states[-1], [tmp_path / "none", tmp_path])
    for state in (stage.states[4], stage.states[2]):
        content = states.content(state.digest)
        assert content is not None
        assert content.outline == state.outline
        assert b"".join(content.chunk(index) for index in range(len(state.outline.chunks))) == b"".join(state.parts())
    assert states.content(Digest(bytes(32))) is None


async def test_a_state_that_newer_ones_have_replaced_is_given_to_the_end_to_who_began_with_it(tmp_path: Path) -> None:
    state = large_state()
    path = write_checkpoint(tmp_path / "checkpoints", MANIFEST.run_id, state)
    net, donor = Loopback(), PeerId("donor")
    store = Store(net.at(donor), [Shelf(tmp_path / "things")], sources=[States(None, [tmp_path / "checkpoints"])])
    await store.serve()
    options: dict[str, Any] = {"max_body_bytes": 1 << 22, "timeout_s": 5.0}
    await net.at(ME).fetch(donor, "store", {"name": state.digest, "want": "outline"}, **options)
    path.unlink()
    part = {"name": state.digest, "start": 1_000_000, "stop": 2_500_000}
    _, body = await net.at(ME).fetch(donor, "store", part, **options)
    assert body == b"".join(state.parts())[1_000_000:2_500_000]


async def test_a_state_in_memory_is_not_held_after_it_was_fetched(tmp_path: Path) -> None:
    states, net, donor = [large_state()], Loopback(), PeerId("donor")
    store = Store(net.at(donor), [Shelf(tmp_path / "things")], sources=[States(lambda: states[-1], [])])
    await store.serve()
    options: dict[str, Any] = {"max_body_bytes": 1 << 22, "timeout_s": 5.0}
    part = {"name": states[0].digest, "start": 0, "stop": 2_000_000}
    await net.at(ME).fetch(donor, "store", part, **options)
    first = weakref.ref(states[0])
    states[:] = [large_state(3.0)]
    await net.at(ME).fetch(donor, "store", {"name": states[0].digest, "want": "outline"}, **options)
    gc.collect()
    assert first() is None


async def test_the_digest_at_a_head_is_had_of_the_newest_state(tmp_path: Path) -> None:
    stage = CertifiedStage().rounds(4)
    states = States(lambda: stage.states[-1], [tmp_path])
    assert (await states.serve_digest(ASKER, {"head": stage.states[4].head})).header["digest"] == stage.states[4].digest
    assert (await states.serve_digest(ASKER, {"head": stage.states[2].head})).header == {}
    for bad in ({}, {"head": b"short"}, {"head": 2}):
        with pytest.raises(ProtocolError):
            await states.serve_digest(ASKER, bad)


@pytest.mark.parametrize("on_disk", [True, False])
async def test_a_state_comes_from_several_donors_and_is_of_the_round_that_was_agreed_on(
    tmp_path: Path, on_disk: bool
) -> None:
    donors, state = Donors(tmp_path), large_state()
    peers = [await donors.donor(name, state) for name in ("a", "b")]
    shelf = Shelf(tmp_path / "arrivals") if on_disk else None
    assert await donors.fetch(state, peers, shelf=shelf) == state
    [told] = donors.told
    assert isinstance(told, StateFetched)
    assert (set(told.donors), told.round) == ({"a", "b"}, 7)
    assert not on_disk or not list((tmp_path / "arrivals" / "partial").iterdir())


async def test_a_donor_of_another_state_or_of_wrong_bytes_is_named_and_nothing_of_it_is_loaded(tmp_path: Path) -> None:
    donors, state = Donors(tmp_path), large_state()
    peers = [await donors.donor("other", large_state(2.0)), await donors.donor("wrong", state)]
    donors.net.wrongs[peers[1]] = lambda piece: piece if len(piece) < 1000 else bytes(len(piece))
    assert await donors.fetch(state, peers) is None
    assert {event.donor for event in donors.told if isinstance(event, StateFetchFailed)} == set(peers)
    donors.told.clear()
    assert await donors.fetch(state, [*peers, await donors.donor("honest", state)]) == state
    assert {event.donor for event in donors.told if isinstance(event, StateFetchFailed)} <= set(peers)


async def test_a_donor_lost_on_the_way_costs_no_byte_twice_and_nor_does_a_restart(tmp_path: Path) -> None:
    donors, state = Donors(tmp_path), large_state()
    outlines = 32 * len(state.outline.chunks)
    peers = [await donors.donor(name, state) for name in ("a", "b")]
    donors.net.breaks[peers[0]] = 700_000
    assert await donors.fetch(state, peers) == state
    assert sum(donors.net.bytes_of.values()) == state.size_bytes + 2 * outlines

    donors.net.bytes_of.clear()
    donors.net.breaks[peers[1]] = 2_500_000
    donors.net.breaks[peers[0]] = 0
    assert await donors.fetch(state, peers, shelf=Shelf(tmp_path / "arrivals")) is None
    donors.net.breaks.clear()
    donors.net.bytes_of.clear()
    assert await donors.fetch(state, peers, shelf=Shelf(tmp_path / "arrivals")) == state
    assert sum(donors.net.bytes_of.values()) < state.size_bytes - 1_900_000


@pytest.mark.parametrize("room", [1 << 40, 1000])
async def test_what_came_of_one_state_stays_while_another_is_asked_for_if_there_is_room(
    tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    donors, slow, other = Donors(tmp_path), large_state(), large_state(2.0)
    peer, liar = await donors.donor("a", slow), await donors.donor("b", other)
    donors.net.breaks = {peer: 1_500_000, liar: 1_200_000}
    assert await donors.fetch(slow, [peer], shelf=Shelf(tmp_path / "arrivals")) is None
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda _folder: SimpleNamespace(free=room))
        assert await donors.fetch(other, [liar], shelf=Shelf(tmp_path / "arrivals"), spared=slow.digest) is None
    assert set(Shelf(tmp_path / "arrivals").begun()) == (
        {slow.digest, other.digest} if room > slow.size_bytes else {other.digest}
    )
    donors.net.breaks.clear()
    donors.net.bytes_of.clear()
    assert await donors.fetch(slow, [peer], shelf=Shelf(tmp_path / "arrivals")) == slow
    assert (donors.net.bytes_of[peer] < slow.size_bytes) is (room > slow.size_bytes)
    assert not Shelf(tmp_path / "arrivals").begun(), "without a word all others go"


async def test_a_state_that_is_not_finite_is_refused_although_it_was_agreed_on(tmp_path: Path) -> None:
    from dataclasses import replace

    import numpy as np

    from dilocox_peer.store.outline import outline_of

    donors, state = Donors(tmp_path), large_state()
    anchor = np.full(LARGE.num_elements, np.nan, dtype="<f4").data.cast("B")
    bad = replace(state, anchor=anchor, outline=outline_of((anchor, state.momentum)))
    assert await donors.fetch(bad, [await donors.donor("a", bad)]) is None
    assert ["not finite" in event.line() for event in donors.told] == [True]
