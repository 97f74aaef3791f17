"""What members make up, with the real machine in its world: a state, a place in the order of offers, a table of slices; and what comes too late."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from dilocox_peer.peer.rounds.adoption import Adoption
from dilocox_peer.peer.rounds.contract import Closed, Received, SliceAveraged, StateComputed
from dilocox_peer.peer.rounds.seats import SeatTerms
from dilocox_peer.peer.rounds.slices import ranked
from dilocox_peer.types import Digest, canonical, sha256
from dilocox_peer.wire.chain import Entry, Report, SliceOutcome, offer_statement
from dilocox_peer.wire.rounds import Offer

from .scenario import starter
from .world import Anchor, Network, Node, World, sign_as


def started(seed: int, num_peers: int, founders: int | None = None) -> tuple[World, list[Node]]:
    """founders of them are there from the start: all, where it is None."""
    world = World(seed, num_peers)
    world.start_peers = founders or num_peers
    world.network = Network(latency_s=0.02, spread_s=0.05, blob_s=0.3)
    nodes = list(world.nodes.values())
    for node in nodes:
        node.slowness = 1.0
    return world, nodes


def begin(world: World, nodes: list[Node]) -> None:
    for node in nodes:
        world.at(world.rng.random(), starter(world, node))
    assert world.run(60.0, stop=lambda: all(node.machine and node.machine.round >= 1 for node in nodes))


def ignore_checks(world: World, *more: str) -> None:
    """The hostile ones break what they say of themselves."""
    for name in ("after_event", "sends", "persists", "noted", "fetched", *more):
        setattr(world.checks, name, lambda *_: None)


class Forged(Anchor):
    """A state that follows from no contribution; its digest is the lowest of those that are equally frequent."""

    def after(self, blobs: Any) -> Anchor:
        blobs = list(blobs)
        return Forged(Digest(b"\0\0" + sha256(self.digest, *blobs)[2:]), self.units) if blobs else self


def is_forged(digest: bytes) -> bool:
    return digest[:2] == b"\0\0"


@pytest.mark.parametrize(("founders", "newcomers"), [(1, 1), (2, 2), (3, 4)])
def test_newcomers_without_a_vote_have_no_voter_fetch_a_state_of_theirs(
    founders: int, newcomers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, nodes = started(5, founders + newcomers, founders)
    world.seat(SeatTerms(contributions=100))
    begin(world, nodes[:founders])
    for node in nodes[founders:]:
        starter(world, node)()
    machine = nodes[0].machine
    assert machine is not None
    assert world.run(
        world.now + 120,
        stop=lambda: (
            len(machine.roster) == len(nodes) and all(node.machine and node.machine.is_ready for node in nodes)
        ),
    )
    ignore_checks(world)
    has_drifted = Adoption.has_drifted
    monkeypatch.setattr(
        Adoption, "has_drifted", lambda self, child: not is_forged(self.anchor.digest) and has_drifted(self, child)
    )
    for node in nodes[founders:]:
        assert node.machine is not None
        assert node.anchor is not None
        node.anchor = Forged(Digest(b"\0\0" + sha256(b"what the attackers like")[2:]), node.anchor.units)
        node.feed(StateComputed(node.machine.head, node.anchor.digest))
    before = machine.round
    world.run(world.now + 60)
    assert machine.round > before + 5
    assert not any(node.anchor is not None and is_forged(node.anchor.digest) for node in nodes[:founders])


@pytest.mark.parametrize("is_open", [False, True])
def test_an_early_offer_of_nothing_is_no_claim_on_anothers_contribution(is_open: bool) -> None:
    """Of two that offer one thing the first counts: it offered nothing first, and then what the victim had offered, as one micro-batch of its own."""
    world, nodes = started(7, 5, 3 if is_open else 5)
    if is_open:
        world.seat(SeatTerms(contributions=4))
    begin(world, nodes[: world.start_peers])
    for node in nodes[world.start_peers :]:
        starter(world, node)()
    honest = nodes[0].machine
    assert honest is not None
    assert world.run(world.now + 60, stop=lambda: len(honest.roster) == 5)
    victim, thief = nodes[3], nodes[4]
    ignore_checks(world)
    thief.make_units = lambda: None  # type: ignore[method-assign]
    heads: dict[str, Digest] = {}
    stolen: set[Digest] = set()
    incarnation = thief.incarnation

    def say(blob: Digest, head: Digest) -> None:
        nonlocal incarnation
        incarnation += 1
        machine = thief.machine
        assert machine is not None
        entry = Entry(thief.peer, incarnation, blob, 100, 1, b"", Report())
        signature = sign_as(thief.peer)(offer_statement(0, head, entry))
        for peer in machine.roster:
            if peer != thief.peer:
                world.deliver(thief.peer, peer, Offer(0, head, machine.view, entry, signature))

    feed = thief.feed

    def hear(happened: Any) -> None:
        feed(happened)
        machine = thief.machine
        if machine is None:
            return
        head = machine.head
        if heads.get("junk") != head:
            heads["junk"] = head
            world.at(world.now + 0.3, lambda: say(sha256(b"junk" + head), head))
        match happened:
            case Received(victim.peer, Offer(head=said, entry=entry)) if said == head != heads.get("copy"):
                heads["copy"] = head
                stolen.add(entry.blob)
                say(entry.blob, head)

    thief.feed = hear  # type: ignore[method-assign]
    before = honest.round
    world.run(world.now + 100)
    rounds = [each.value for each in honest.chain if each.value.kind == "round" and each.value.round > before + 2]
    assert len(rounds) > 8
    counted = [[entry.peer for entry in value.entries] for value in rounds]
    assert sum(victim.peer in each for each in counted) >= len(rounds) - 2
    copies = sum(entry.peer == thief.peer and entry.blob in stolen for value in rounds for entry in value.entries)
    assert copies <= len(rounds) // 8, "now and then it is the faster of the two on the way to a leader"


def test_a_result_that_is_offered_as_a_contribution_counts_for_nobody() -> None:
    """Everybody holds it. Once so few were left that contributions are whole it was certified, and no merge could read it."""
    world, nodes = started(1, 4)
    world.be_sliced(4)
    begin(world, nodes)
    assert world.run(60.0, stop=lambda: world.checks.sliced >= 2)
    ignore_checks(world)
    leaver, hostile, honest = nodes[0], nodes[1], nodes[2].machine
    assert honest is not None
    leaver.gone_for_good = True
    leaver.crash()
    offered: list[Digest] = []
    feed = hostile.feed

    def tell(happened: Any) -> None:
        machine = hostile.machine
        if isinstance(happened, Closed) and machine is not None and not machine.is_sliced:
            name = next(each for each in reversed(machine.chain) if each.value.results).value.results[0].blob
            offered.append(name)
            happened = Closed(happened.base, msgspec.structs.replace(happened.entry, blob=name, size_bytes=100), ())
        feed(happened)

    hostile.feed = tell  # type: ignore[method-assign]
    before = honest.round
    world.run(world.now + 60)
    assert offered
    assert honest.round > before + 5
    assert not any(entry.blob in offered for each in honest.chain for entry in each.value.entries)


def test_a_table_that_is_named_as_a_residual_holds_up_no_round() -> None:
    """Two average a slice, say so, and are gone: with that residual, which everybody held, none of the slice's later means could be made."""
    world, nodes = started(3, 7)
    world.be_sliced(4)
    begin(world, nodes)
    assert world.run(60.0, stop=lambda: world.checks.sliced >= 2)
    ignore_checks(world, "averaged")
    first = nodes[0].machine
    assert first is not None
    sharing = first.sitting.seat.place.sharing
    assert sharing is not None
    pair = [world.nodes[peer] for peer in ranked(sharing, first.roster)[0][:2]]
    false: list[Digest] = []

    def lying(feed: Callable[[Any], None]) -> Callable[[Any], None]:
        def tell(happened: Any) -> None:
            if isinstance(happened, SliceAveraged) and happened.slice == 0 and happened.outcome is not None:
                table = first.chain[-1].value.entries[0].blob
                false.append(table)
                true = happened.outcome
                happened = replace(happened, outcome=SliceOutcome(true.blob, true.size_bytes, true.base, table))
            feed(happened)

        return tell

    for node in pair:
        node.feed = lying(node.feed)  # type: ignore[method-assign,assignment]
    assert world.run(
        world.now + 60,
        stop=lambda: any(each.value.results and each.value.results[0].residual in false for each in first.chain),
    )
    for node in pair:
        node.gone_for_good = True
        node.crash()
    machine = next(node.machine for node in nodes if node not in pair)
    assert machine is not None
    before = machine.round
    world.run(world.now + 90)
    assert machine.round > before + 5


def test_a_contribution_that_closes_too_late_does_not_stay_on_the_disk() -> None:
    world, nodes = started(5, 3)
    begin(world, nodes)
    late, machine = nodes[0], nodes[0].machine
    assert machine is not None
    assert world.run(60.0, stop=lambda: machine.round >= 2)
    blob = canonical(["movement", []])
    name = sha256(blob)
    late.disk.blobs[name] = blob
    late.feed(Closed(machine.chain[-2].head, Entry(late.peer, late.incarnation, name, len(blob), 8, b"", Report())))
    world.run(world.now + 200)
    assert machine.round > 20
    assert name not in late.disk.blobs
