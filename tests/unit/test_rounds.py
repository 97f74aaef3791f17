"""The round machine, a few peers at a table: messages are delivered in order, time moves when the test says so."""

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from dilocox_peer.contract import Leaving, Note, Tick
from dilocox_peer.events import BranchSwitched, MemberDoubted, MessageRefused, NeighbourLost, ViewChanged
from dilocox_peer.events_of_rounds import ContributionRefused, ContributionsMissed
from dilocox_peer.peer.planning.plan import PlanBounds
from dilocox_peer.peer.rounds.chain import vote_for
from dilocox_peer.peer.rounds.contract import (
    Action,
    Apply,
    BlobHeld,
    BlobLost,
    BlobMissing,
    BlobRefused,
    Closed,
    FetchBlob,
    FetchState,
    ForgetBlobs,
    Input,
    PeerFound,
    PeerRefused,
    Persist,
    Received,
    RoundProgress,
    Send,
    StateComputed,
    StateInstalled,
    StateMissing,
)
from dilocox_peer.peer.rounds.durable import Durable, Votes, encode_record, load_log
from dilocox_peer.peer.rounds.justified import promise_statement
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.membership import MAX_KNOWN
from dilocox_peer.peer.rounds.seat import Seat
from dilocox_peer.peer.rounds.timing import Timing
from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Entry, Plan, Value, acceptance, offer_statement
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.rounds import (
    Accepted,
    Ack,
    Cert,
    ChainPage,
    GetChain,
    Heartbeat,
    Leave,
    Message,
    Nack,
    Offer,
    Prepare,
    Promise,
    Promised,
    Propose,
    ViewCall,
)

GENESIS = sha256(b"genesis")
PLAN = Plan("fp16", 0, 8)
TIMING = Timing(
    settle_s=1.0,
    genesis_patience_s=2.0,
    offer_wait_start_s=4.0,
    ballot_start_s=4.0,
    degrade_s=20.0,
    first_degrade_s=20.0,
)


def signer(peer: PeerId) -> Callable[[bytes], bytes]:
    return lambda message: sha256(peer.encode(), message)


def verify(peer: PeerId, message: bytes, signature: bytes) -> bool:
    return signature == sha256(peer.encode(), message)


class Table:
    """Machines, what each has done, and who can hear whom. Blobs are fetched at once from whoever holds them."""

    def __init__(
        self, *names: str, timing: Timing = TIMING, total_rounds: int | None = None, start_peers: int = 1
    ) -> None:
        self.now = 0.0
        self.timing, self.total_rounds, self.start_peers = timing, total_rounds, start_peers
        self.machines: dict[PeerId, RoundMachine] = {}
        self.done: dict[PeerId, list[Action]] = {}
        self.logs: dict[PeerId, bytes] = {}
        self.blobs: dict[PeerId, set[Digest]] = {}
        self.mute: set[tuple[PeerId, PeerId]] = set()
        self.swallow: Callable[[PeerId, PeerId, Message], bool] = lambda sender, to, message: False
        self.bad: set[Digest] = set()
        self.states_from: set[PeerId] = set()
        self.anchors: dict[PeerId, bytes] = {}
        self._inbox: list[tuple[PeerId, Input]] = []
        for name in names:
            self.sit(PeerId(name))

    def sit(
        self,
        peer: PeerId,
        incarnation: int = 1,
        stored_states: Iterable[Digest] = (),
        stored_blobs: Iterable[Digest] = (),
    ) -> RoundMachine:
        self.machines[peer] = RoundMachine(
            me=peer, incarnation=incarnation, stage=0, genesis=GENESIS, timing=self.timing, sign=signer(peer),
            verify=verify, rng=random.Random(incarnation), now=self.now, plan=PLAN, start_peers=self.start_peers,
            max_peers=8, plans=PlanBounds(total_steps=self.total_rounds and self.total_rounds * PLAN.inner_steps), durable=load_log(self.logs.get(peer, b""), GENESIS).durable,
            stored_states=set(stored_states), stored_blobs=set(stored_blobs),
        )  # fmt: skip
        self.done[peer] = []
        self.blobs.setdefault(peer, set())
        self.give(peer, Tick())
        for other in list(self.machines):
            if other != peer:
                self.give(peer, PeerFound(other))
        return self.machines[peer]

    def leave_the_room(self, peer: PeerId) -> None:
        del self.machines[peer]

    def give(self, peer: PeerId, *inputs: Input) -> None:
        self._inbox += [(peer, happened) for happened in inputs]
        while self._inbox:
            to, happened = self._inbox.pop(0)
            if to in self.machines:
                for action in self.machines[to].handle(happened, self.now):
                    self.done[to].append(action)
                    self._carry_out(to, action)

    def _carry_out(self, peer: PeerId, action: Action) -> None:
        match action:
            case Send(to, message):
                if to not in self.machines or (peer, to) in self.mute or self.swallow(peer, to, message):
                    return
                self._inbox.append((to, Received(peer, message)))
            case Persist(state):
                self.logs[peer] = self.logs.get(peer, b"") + encode_record(state)
            case FetchBlob():
                self._inbox.append((peer, self._fetch(peer, action)))
            case Apply(certificate):
                self._inbox.append((peer, StateComputed(certificate.head, self.anchors.get(peer, certificate.head))))
            case FetchState(head, donors=donors):
                if donors and self.states_from >= set(donors):
                    self._inbox.append((peer, StateInstalled(head, head)))
            case _:
                pass

    def _fetch(self, peer: PeerId, action: FetchBlob) -> Input:
        if action.blob in self.bad:
            return BlobRefused(action.blob, "malformed", action.part)
        if any(
            action.blob in self.blobs[source]
            for source in (peer, *action.sources)
            if source in self.machines or source == peer
        ):
            self.blobs[peer].add(action.blob)
            return BlobHeld(action.blob, 10, (), action.part)
        return BlobMissing(action.blob)

    def wait(self, seconds: float) -> None:
        """Time passes; every machine is ticked when it asked to be."""
        until = self.now + seconds
        while True:
            due = [(machine.deadline() or until + 1, peer) for peer, machine in self.machines.items()]
            moment, peer = min(due)
            if moment > until:
                self.now = until
                return
            self.now = max(self.now, moment)
            self.give(peer, Tick())

    def offer(self, *names: str, incarnation: int = 1, alike: bool = False) -> dict[PeerId, Entry]:
        """alike: all have made the same contribution."""
        entries = {}
        for name in names:
            peer = PeerId(name)
            machine = self.machines[peer]
            blob = sha256(b"blob", b"" if alike else peer.encode(), machine.head, bytes([incarnation]))
            self.blobs[peer].add(blob)
            entry = entries[peer] = Entry(peer, incarnation, blob, 10, 8, machine.state_digest)
            self.give(peer, Closed(machine.head, entry))
        return entries

    def start(self) -> "Table":
        """Until the run has its first roster."""
        self.wait(8.0)
        assert all(len(machine.roster) == len(self.machines) for machine in self.machines.values())
        return self

    def did(self, name: str, kind: type) -> list:  # type: ignore[type-arg]
        return [action for action in self.done[PeerId(name)] if isinstance(action, kind)]

    def said(self, name: str, kind: type) -> list:  # type: ignore[type-arg]
        return [action.message for action in self.did(name, Send) if isinstance(action.message, kind)]

    def noted(self, name: str, kind: type) -> list:  # type: ignore[type-arg]
        return [action.event for action in self.did(name, Note) if isinstance(action.event, kind)]

    def heads(self) -> set[Digest]:
        return {machine.head for machine in self.machines.values()}

    def machine(self, name: str) -> RoundMachine:
        return self.machines[PeerId(name)]

    def seat(self, name: str) -> Seat:
        return self.machine(name).sitting.seat

    def by_rank(self) -> list[str]:
        """Names in the order in which they lead at the common head."""
        machine = next(iter(self.machines.values()))
        return [str(peer) for peer in machine.sitting.seat.order]


At = tuple[int, Digest, int]


def acceptance_of(at: At, peer: PeerId, ballot: int, value: Value) -> bytes:
    """What peer signs when it accepts value."""
    return vote_for(acceptance(at[0], at[1], at[2], ballot, value), 1, signer(peer))


def promised(at: At, ballot: int, peer: PeerId, accepted: tuple[int, Digest] | None = None) -> Promised:
    return Promised(peer, accepted, signer(peer)(promise_statement(at, ballot, accepted)))


def offered(at: At, entry: Entry) -> Offer:
    return Offer(*at, entry, signer(entry.peer)(offer_statement(at[0], at[1], entry)))


def proposal(at: At, leader: str, ballot: int, value: Value, promises: Sequence[Promised] = ()) -> Propose:
    authors = tuple(offered(at, entry).signature for entry in value.entries)
    return Propose(*at, ballot, value, acceptance_of(at, PeerId(leader), ballot, value), tuple(promises), authors)


def contributors(table: Table, name: str) -> list[str]:
    return [str(entry.peer) for entry in table.machine(name).chain[-1].value.entries]


# ---- starting ----


def test_a_lone_peer_starts_and_certifies_its_round_at_once() -> None:
    table = Table("a").start()
    table.offer("a")
    assert (table.machine("a").round, contributors(table, "a")) == (1, ["a"])


def test_peers_that_start_together_are_all_in_the_first_roster() -> None:
    table = Table("a", "b", "c").start()
    assert len(table.heads()) == 1
    assert [event.view for event in table.noted("a", ViewChanged)] == [1]


def test_the_run_does_not_start_before_enough_peers_are_here() -> None:
    table = Table("a", "b", start_peers=3)
    table.wait(60.0)
    assert table.heads() == {GENESIS}
    table.sit(PeerId("c"))
    table.wait(8.0)
    assert [len(machine.roster) for machine in table.machines.values()] == [3, 3, 3]


# ---- a round ----


def test_all_offers_make_one_certificate_that_everyone_applies() -> None:
    table = Table("a", "b", "c").start()
    entries = table.offer("a", "b", "c")
    assert len(table.heads()) == 1
    assert contributors(table, "a") == ["a", "b", "c"]
    for name in "abc":
        assert table.did(name, Apply)[-1].own == entries[PeerId(name)]


def test_the_leader_waits_for_late_offers_but_not_for_ever() -> None:
    table = Table("a", "b", "c").start()
    table.offer("a", "b")
    assert table.machine("a").round == 0
    table.wait(TIMING.offer_wait_start_s + 1.0)
    assert contributors(table, "a") == ["a", "b"]
    assert table.did("c", Apply)[-1].own is None
    for name in "abc":
        [missed] = [each.event for each in table.did(name, Note) if isinstance(each.event, ContributionsMissed)]
        [(peer, why)] = missed.missed
        assert peer == "c"
        assert why.startswith("had not ended its round ")


def test_an_ack_follows_its_persist_and_the_last_blob() -> None:
    table = Table("a", "b", "c").start()
    table.offer("a", "b", "c")
    for name in "abc":
        actions = table.done[PeerId(name)]
        for index, action in enumerate(actions):
            if not isinstance(action, Send) or not isinstance(action.message, Ack):
                continue
            persisted = [earlier for earlier in actions[:index] if isinstance(earlier, Persist)][-1]
            accepted = persisted.state.votes.accepted
            assert accepted is not None
            assert accepted.value.digest() == action.message.value
            assert {entry.blob for entry in accepted.value.entries} <= table.blobs[PeerId(name)]


def test_persist_with_the_new_chain_precedes_apply() -> None:
    table = Table("a", "b").start()
    table.offer("a", "b")
    actions = table.done[PeerId("a")]
    applied = [(before, action) for before, action in pairwise(actions) if isinstance(action, Apply)]
    assert applied
    for before, action in applied:
        assert isinstance(before, Persist)
        assert before.state.appended == (action.certificate,)


def test_a_blob_refused_by_the_others_is_left_out() -> None:
    table = Table("a", "b", "c").start()
    table.bad.add(sha256(b"blob", b"b", table.machine("b").head, bytes([1])))
    table.offer("a", "b", "c")
    table.wait(10.0)
    assert contributors(table, "a") == ["a", "c"]
    assert len(table.heads()) == 1
    for honest in ("a", "c"):
        assert table.noted(honest, ContributionRefused) == [ContributionRefused(PeerId("b"), 1, "malformed")]


def test_what_its_author_has_not_signed_is_neither_taken_nor_voted_for() -> None:
    table = Table("a", "b", "c").start()
    first, second, third = table.by_rank()
    machine = table.machine(second)
    at, place = machine.sitting.seat.at(), machine.sitting.seat.place
    table.swallow = lambda sender, to, message: True
    entry = Entry(PeerId(third), 1, sha256(b"x"), 1, 1)
    assert refusals(table, second, third, Offer(*at, entry, b"x" * 32)) == [f"an entry that {third} has not signed"]
    elsewhere = offered((at[0], sha256(b"another head"), at[2]), entry).signature
    assert refusals(table, second, third, Offer(*at, entry, elsewhere)) == [f"an entry that {third} has not signed"]
    good = proposal(at, first, 0, place.round_value([entry], place.roster))
    unshown, forged = replaced(good, authors=()), replaced(good, authors=(b"x" * 32,))
    assert refusals(table, second, first, unshown) == ["1 entries with 0 signatures of their authors"]
    assert refusals(table, second, first, forged) == [f"an entry that {third} has not signed"]
    assert [event.peer for event in table.noted(second, MemberDoubted)] == [first]
    assert refusals(table, second, first, good) == []


def test_what_a_stranger_signed_is_not_remembered_in_whoevers_name_it_comes() -> None:
    """Keys cost nothing: a leader that names entries of ever new ones would fill the memory of all."""
    table = Table("a", "b", "c").start()
    seat, arrivals = table.seat("a"), table.machine("a").sitting.arrivals
    entry = Entry(PeerId("z"), 1, sha256(b"x"), 1, 1)
    signature = offered(seat.at(), entry).signature
    assert arrivals.why_not_signed([entry], [signature]) == "an entry of z, which is not in the roster"
    assert arrivals.authors([entry]) != (signature,)


def test_who_offers_what_another_has_made_is_left_out() -> None:
    """It needs no more than the offer it hears; it names the same contribution, and claims the work. Who leads is another."""
    table = Table("a", "b", "c", "d").start()
    leader, author, copier, _ = table.by_rank()
    made = table.offer(author)[PeerId(author)]
    copied = replaced(made, peer=PeerId(copier), micro_batches=64)
    at = (0, table.machine(leader).head, table.machine(leader).view)
    table.give(PeerId(leader), Received(PeerId(copier), offered(at, copied)))
    table.offer(*(name for name in "abcd" if name not in (author, copier)))
    table.wait(TIMING.offer_wait_start_s + 1.0)
    assert contributors(table, leader) == sorted(set("abcd") - {copier})
    assert table.did(author, Apply)[-1].own == made


def test_a_leader_that_names_one_of_several_that_offer_the_same_is_not_doubted() -> None:
    """Honest peers do where nothing was learned, as from data that are all padding."""
    table = Table("a", "b", "c", "d").start()
    table.offer(*"abcd", alike=True)
    table.wait(TIMING.offer_wait_start_s + 1.0)
    assert len(contributors(table, "a")) == 1
    assert [table.noted(name, MemberDoubted) for name in "abcd"] == [[], [], [], []]


def test_for_a_bad_blob_that_nobody_has_offered_here_its_author_answers_that_signed_it() -> None:
    """Its leader may have heard the offer alone, and shows who signed it."""
    table = Table("a", "b", "c").start()
    leader = table.by_rank()[0]
    author, witness = (name for name in table.by_rank() if name != leader)
    place = table.seat(witness).place
    blob = sha256(b"made up")
    table.bad.add(blob)
    value = place.round_value([Entry(PeerId(author), 1, blob, 10, 8)], place.roster)
    at = (0, place.head, place.view)
    table.give(PeerId(witness), Received(PeerId(leader), proposal(at, leader, 0, value)))
    table.wait(10.0)
    assert table.noted(witness, ContributionRefused) == [ContributionRefused(PeerId(author), 1, "malformed")]


def test_a_leaders_vote_for_its_own_bad_blob_does_not_come_back() -> None:
    """Found by the simulator: the leader's own accepted value was proposed again in every ballot, for ever."""
    table = Table("a", "b", "c", "d", "e").start()
    leader = table.by_rank()[0]
    table.bad.add(sha256(b"blob", leader.encode(), table.machine(leader).head, bytes([1])))
    table.offer(*"abcde")
    table.wait(10.0)
    assert contributors(table, "a") == sorted(set("abcde") - {leader})
    assert table.machine("a").chain[-1].ballot <= 5


def test_an_offer_is_repeated_ever_more_seldom_and_told_at_once_to_who_comes_to_the_head() -> None:
    table = Table("a", "b", "c").start()
    head = table.machine("a").head
    offered: list[tuple[float, PeerId]] = []

    def see(sender: PeerId, to: PeerId, message: Message) -> bool:
        if sender == "a" and isinstance(message, Offer):
            offered.append((table.now, to))
        return True  # nobody hears of it: the round goes on

    began = table.now
    table.swallow = lambda sender, to, message: isinstance(message, Offer) and see(sender, to, message)
    table.offer("a")
    table.wait(5.0 * TIMING.retry_s)
    assert {to for _, to in offered} == {"b", "c"}
    times = [moment - began for moment, to in offered if to == "b"]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert [round(gap / TIMING.retry_s / 1.1) for gap in gaps] == [1, 2]  # and 4, 8, 8 ...
    del offered[:]
    table.sit(PeerId("b"), incarnation=2, stored_states={head})
    table.give(PeerId("b"), StateInstalled(head, b""))
    table.wait(TIMING.heartbeat_s * 1.2)
    assert offered[0][1] == "b", "it may have lost ours"


def test_the_newest_incarnation_of_a_peer_is_the_one_that_offers() -> None:
    table = Table("a", "b", "c").start()
    old = table.offer("b")[PeerId("b")]
    table.sit(PeerId("b"), incarnation=2, stored_states={table.machine("b").head})
    table.give(PeerId("b"), StateInstalled(table.machine("b").head, b""))
    new = table.offer("b", incarnation=2)[PeerId("b")]
    table.offer("a", "c")
    table.wait(2.0)
    entries = table.machine("a").chain[-1].value.entries
    assert new in entries
    assert old not in entries


def test_an_offer_on_an_older_head_is_ignored_by_the_machine_itself() -> None:
    table = Table("a").start()
    old = table.machine("a").head
    table.offer("a")
    table.give(PeerId("a"), Closed(old, Entry(PeerId("a"), 1, sha256(b"late"), 1, 1)))
    assert not table.machine("a").has_offered
    assert table.machine("a").may_offer


# ---- ballots ----


def test_the_next_leader_proposes_when_the_first_is_silent() -> None:
    table = Table("a", "b", "c").start()
    first, *others = table.by_rank()
    table.leave_the_room(PeerId(first))
    table.offer(*others)
    table.wait(30.0)
    chain = table.machine(others[0]).chain
    rounds = [certificate for certificate in chain if certificate.value.kind == "round"]
    assert [str(entry.peer) for entry in rounds[0].value.entries] == sorted(others)
    assert rounds[0].ballot in (1, 2)
    assert len(table.heads()) == 1


def test_a_leader_that_dies_as_it_proposes_in_the_first_round_costs_a_ballot_and_no_view_change() -> None:
    """Nothing is learned yet then, and the start value of the offer wait is longer than a view change's patience."""
    table = Table("a", "b", "c", "d", timing=replace(TIMING, offer_wait_start_s=30.0)).start()
    first = table.by_rank()[0]
    others = [name for name in "abcd" if name != first]
    table.swallow = lambda sender, to, message: sender == first and isinstance(message, Propose)
    table.offer("a", "b", "c", "d")
    assert table.said(first, Propose)
    table.leave_the_room(PeerId(first))
    for name in others:
        table.give(PeerId(name), PeerRefused(PeerId(first)))
    table.wait(TIMING.alive_s)
    for name in others:
        assert (table.machine(name).round, table.machine(name).view) == (1, 1)
        assert contributors(table, name) == ["a", "b", "c", "d"]


def test_a_value_that_may_have_a_quorum_is_proposed_again_by_the_next_leader() -> None:
    table = Table("a", "b", "c").start()
    first, second, third = table.by_rank()
    table.swallow = lambda sender, to, message: (
        (isinstance(message, Propose) and str(to) == third and message.ballot == 0)
        or (isinstance(message, Ack) and str(to) == first)
    )
    table.offer("a", "b", "c")
    proposed = table.said(first, Propose)[0].value
    table.leave_the_room(PeerId(first))
    table.swallow = lambda sender, to, message: False
    table.wait(40.0)
    rounds = [certificate for certificate in table.machine(second).chain if certificate.value.kind == "round"]
    assert rounds[0].value.entries == proposed.entries
    assert rounds[0].value.roster == proposed.roster


def test_of_two_accepted_values_the_one_of_the_higher_ballot_is_proposed() -> None:
    """The simulator does not find this mistake in 400 seeds: it takes two half-accepted values and a lost certificate."""
    table = Table(*"abcde").start()
    name = table.by_rank()[3]
    machine = table.machine(name)
    at, place = machine.sitting.seat.at(), machine.sitting.seat.place
    table.swallow = lambda sender, to, message: True
    table.offer(name)
    while not table.said(name, Prepare):
        table.wait(1.0)
    ballot = table.said(name, Prepare)[-1].ballot
    others = [peer for peer in place.roster if peer != name]
    entries = [Entry(peer, 1, sha256(peer.encode()), 10, 8, machine.state_digest) for peer in others]
    for entry in entries:
        table.blobs[entry.peer].add(entry.blob)
    authors = tuple(signer(each.peer)(offer_statement(place.stage, place.head, each)) for each in entries)
    low, high = place.round_value(entries[:3], place.roster), place.round_value(entries, place.roster)
    assert ballot > 1
    first, second = (PeerId(each) for each in table.by_rank()[:2])
    quorum = tuple(promised(at, 1, peer) for peer in place.roster[:3])
    accepted = [
        Accepted(1, high, acceptance_of(at, second, 1, high), quorum, authors),
        Accepted(0, low, acceptance_of(at, first, 0, low), (), authors[:3]),
    ]
    for other, each in zip(others, accepted, strict=False):
        signature = promised(at, ballot, other, each.named).signature
        table.give(PeerId(name), Received(other, Promise(*at, ballot, each, signature)))
    assert [message.value for message in table.said(name, Propose)][-1] == high


def test_a_restarted_leader_proposes_the_same_value_in_the_same_ballot() -> None:
    table = Table("a", "b", "c").start()
    first = table.by_rank()[0]
    head = table.machine(first).head
    table.swallow = lambda sender, to, message: isinstance(message, Propose)
    table.offer("a", "b", "c")
    proposed = table.said(first, Propose)[0]
    table.swallow = lambda sender, to, message: isinstance(message, Ack)
    table.sit(PeerId(first), incarnation=2, stored_states={head})
    table.give(PeerId(first), StateInstalled(head, b""))
    again = table.said(first, Propose)
    assert again
    assert all(message.value == proposed.value for message in again if message.ballot == proposed.ballot)


def test_a_promise_survives_a_restart() -> None:
    table = Table("a", "b", "c").start()
    first, second, third = table.by_rank()
    at = table.seat(first).at()
    table.give(PeerId(third), PeerRefused(PeerId(first)))  # whose turn it is
    table.give(PeerId(third), Received(PeerId(second), Prepare(*at, 1)))
    assert [message.ballot for message in table.said(third, Promise)] == [1]
    head = table.machine(third).head
    table.sit(PeerId(third), incarnation=2, stored_states={head})
    table.give(PeerId(third), StateInstalled(head, b""))
    value = table.seat(third).place.round_value([], table.machine(third).roster)
    table.give(PeerId(third), Received(PeerId(first), proposal(at, first, 0, value)))
    assert [message.promised for message in table.said(third, Nack)] == [1]
    assert not table.said(third, Ack)


def test_one_leftover_promise_does_not_stop_a_quorum_without_it() -> None:
    table = Table("a", "b", "c").start()
    first, second, third = table.by_rank()
    table.give(PeerId(second), PeerRefused(PeerId(first)))
    table.give(PeerId(second), Received(PeerId(third), Prepare(*table.seat(first).at(), 2)))
    table.offer("a", "b", "c")
    assert [message.promised for message in table.said(second, Nack)] == [2]
    assert table.machine(first).chain[-1].ballot == 0


def test_a_leader_refused_for_ballots_that_nobody_leads_soon_asks_above_them() -> None:
    table = Table("a", "b", "c").start()
    first, second, third = table.by_rank()
    at = table.seat(first).at()
    table.give(PeerId(second), PeerRefused(PeerId(first)))
    table.give(PeerId(second), Received(PeerId(third), Prepare(*at, 2)))
    table.give(PeerId(third), PeerRefused(PeerId(first)))
    table.give(PeerId(third), Received(PeerId(second), Prepare(*at, 4)))
    table.offer("a", "b", "c")
    assert table.machine(first).round == 0
    table.wait(1.2 * TIMING.retry_s)
    assert (table.machine(first).round, table.machine(first).chain[-1].ballot) == (1, 6)


def test_a_leader_gives_way_to_whoever_leads_the_higher_ballot() -> None:
    table = Table("a", "b", "c").start()
    first, second, third = table.by_rank()
    at = table.seat(first).at()
    table.swallow = lambda sender, to, message: isinstance(message, Ack)
    table.offer("a", "b", "c")
    table.give(PeerId(third), Received(PeerId(second), Prepare(*at, 4)))
    table.give(PeerId(first), Received(PeerId(second), Prepare(*at, 4)))
    table.wait(2 * TIMING.retry_s)
    assert not table.said(first, Prepare)


def test_acks_that_come_after_a_higher_ballot_was_asked_for_count_still() -> None:
    """It had promised and counted no more, so that three members took five ballots (slices, seed 9738)."""
    table = Table("a", "b", "c").start()
    first, second, third = table.by_rank()
    at = table.seat(first).at()
    late: list[Ack] = []

    def hold_back(sender: PeerId, to: PeerId, message: Message) -> bool:
        if isinstance(message, Ack) and sender == third:
            late.append(message)
        return isinstance(message, Ack | Prepare)

    table.swallow = hold_back
    table.offer("a", "b", "c")
    table.wait(1.25 * TIMING.ballot_start_s)  # the second's turn has come
    table.swallow = lambda sender, to, message: isinstance(message, Ack | Promise)
    table.give(PeerId(first), Received(PeerId(second), Prepare(*at, 1)))
    assert [message.ballot for message in table.said(first, Promise)] == [1]
    assert table.machine(first).round == 0
    table.give(PeerId(first), Received(PeerId(third), late[0]))
    assert (table.machine(first).round, table.machine(first).chain[-1].ballot) == (1, 0)
    head = table.machine(first).head
    table.swallow = lambda sender, to, message: False
    table.wait(2 * TIMING.retry_s)
    assert table.heads() == {head}


def test_a_first_leader_that_promised_before_its_restart_asks_at_once() -> None:
    table = Table("a", "b", "c").start()
    first, second, third = table.by_rank()
    head = table.machine(first).head
    promised_once = Durable(table.seat(first).place.height, (), Votes(head, promised=1))
    table.logs[PeerId(first)] += encode_record(promised_once)
    table.sit(PeerId(first), incarnation=2, stored_states={head})
    table.give(PeerId(first), StateInstalled(head, b""))
    table.offer(second, third)
    table.offer(first, incarnation=2)
    assert (table.machine(first).round, table.machine(first).chain[-1].ballot) == (1, 3)


def test_a_proposal_that_nobody_outbids_may_still_be_accepted_late() -> None:
    table = Table("a", "b", "c").start()
    first = table.by_rank()[0]
    table.swallow = lambda sender, to, message: isinstance(message, Ack | Prepare)
    table.offer("a", "b", "c")
    table.wait(1.25 * TIMING.ballot_start_s)  # the second ballot's turn has come, the third's cannot have
    assert table.machine(first).round == 0
    table.swallow = lambda sender, to, message: isinstance(message, Prepare)
    table.wait(1.2 * TIMING.retry_s)
    assert (table.machine(first).round, table.machine(first).chain[-1].ballot) == (1, 0)


def test_nobody_uses_the_numbers_of_ballots_up() -> None:
    """One PREPARE, or a refusal that claimed such a promise, and the next ballot of everybody else was too high to be read."""
    table = Table("a", "b", "c").start()
    first, second, third = table.by_rank()
    at, highest = table.seat(first).at(), (1 << 40) - (1 << 40) % 3
    for name in (first, second):
        assert refusals(table, name, third, Prepare(*at, highest - 1)) == [
            f"prepares ballot {highest - 1}, far above 0"
        ]
    table.swallow = lambda sender, to, message: isinstance(message, Ack)
    table.offer("a", "b", "c")
    table.give(PeerId(first), Received(PeerId(third), Nack(*at, 0, highest - 1, ())))
    table.wait(1.2 * TIMING.retry_s)
    assert not table.said(first, Prepare)
    table.swallow = lambda sender, to, message: False
    table.wait(60.0)
    assert table.heads() == {table.machine(first).head}
    assert (table.machine(first).round, table.machine(first).view) == (1, 1)


# ---- what strangers send ----


def refusals(table: Table, name: str, sender: str, message: Message) -> list[str]:
    table.now += 2.0  # refusals of one peer are noted once a second
    before = len(table.noted(name, MessageRefused))
    table.give(PeerId(name), Received(PeerId(sender), message))
    return [event.reason for event in table.noted(name, MessageRefused)[before:]]


def test_what_is_not_theirs_to_say_is_refused_with_the_reason() -> None:
    table = Table("a", "b", "c").start()
    first, second, third = table.by_rank()
    machine = table.machine(first)
    at, place = machine.sitting.seat.at(), machine.sitting.seat.place
    value = place.round_value([], machine.roster)
    strange = Entry(PeerId(third), 1, sha256(b"x"), 1, 1)
    table.swallow = lambda sender, to, message: True
    assert refusals(table, first, second, proposal(at, second, 0, value)) == [
        "proposes in ballot 0, which it does not lead"
    ]
    assert refusals(table, first, third, Prepare(*at, 1)) == ["prepares ballot 1, which it does not lead"]
    assert refusals(table, first, second, offered(at, strange)) == [f"an offer in the name of {third}"]
    assert refusals(table, first, second, proposal(at, second, 1, replaced(value, weight=9))) == [
        "weight 9 after 0 with 0 entries"
    ]
    mine = replaced(strange, peer=PeerId(first))
    forged = place.round_value([mine], machine.roster)
    assert refusals(table, first, second, proposal(at, second, 1, forged)) == ["an offer in our name that is not ours"]


def test_a_message_of_another_stage_is_passed_over_without_a_word() -> None:
    table = Table("a", "b").start()
    machine = table.machine("a")
    elsewhere = Heartbeat(7, *machine.sitting.seat.at()[1:], 1, 1, 0, 0, 1, 0, True, b"")
    assert refusals(table, "a", "stranger", elsewhere) == []
    assert PeerId("stranger") not in machine.alive(table.now)


def test_who_left_is_greeted_no_more_until_it_says_that_it_is_back() -> None:
    table = Table("a", "b", "c").start()
    table.give(PeerId("a"), Received(PeerId("c"), Leave(*table.seat("c").at(), 1)))
    table.leave_the_room(PeerId("c"))
    table.offer("a", "b")
    assert table.machine("a").roster == ("a", "b")
    before = len(table.done[PeerId("a")])
    table.wait(30.0)
    greeted = {action.to for action in table.done[PeerId("a")][before:] if isinstance(action, Send)}
    assert greeted == {"b"}


def test_a_forged_certificate_is_refused() -> None:
    table = Table("a", "b", "c").start()
    table.offer("a", "b", "c")
    good = table.machine("a").chain[-1]
    victim = Table("a", "b", "c").start()
    forged = replaced(good, signatures=tuple((peer, b"x" * 32) for peer, _ in good.signatures))
    at = victim.machine("a").sitting.seat.at()
    assert refusals(victim, "a", "b", Cert(*at, forged)) == ["a signature that does not verify"]
    assert victim.machine("a").round == 0


def test_an_ack_with_a_wrong_signature_does_not_count() -> None:
    table = Table("a", "b", "c").start()
    first, second, _ = table.by_rank()
    table.swallow = lambda sender, to, message: isinstance(message, Ack)
    table.offer("a", "b", "c")
    proposed = table.said(first, Propose)[0]
    at = table.seat(first).at()
    ack = Ack(*at, 0, proposed.value.digest(), b"x" * 32)
    assert refusals(table, first, second, ack) == ["a signature that does not verify"]
    assert table.machine(first).round == 0
    good = vote_for(acceptance(0, at[1], at[2], 0, proposed.value), 1, signer(PeerId(second)))
    table.give(PeerId(first), Received(PeerId(second), replaced(ack, signature=good)))
    assert table.machine(first).round == 1


# ---- rosters ----


def test_a_joiner_that_holds_the_head_is_in_the_next_roster() -> None:
    table = Table("a", "b").start()
    table.states_from = {PeerId("a"), PeerId("b")}
    table.sit(PeerId("c"))
    table.wait(4.0)
    assert table.machine("c").head == table.machine("a").head
    assert not table.machine("c").may_offer
    table.offer("a", "b")
    table.wait(1.0)
    assert table.machine("a").roster == ("a", "b", "c")
    assert table.machine("c").may_offer


def test_a_peer_that_leaves_is_not_in_the_next_roster() -> None:
    table = Table("a", "b", "c").start()
    last = table.by_rank()[-1]
    table.give(PeerId(last), Leaving())
    assert table.machine(last).deadline() is None
    table.leave_the_room(PeerId(last))
    others = [name for name in "abc" if name != last]
    table.offer(*others)
    table.wait(1.0)
    assert table.machine(others[0]).roster == tuple(others)


def test_a_dead_peer_is_dropped_by_the_quorum_that_is_left() -> None:
    table = Table("a", "b", "c").start()
    last = table.by_rank()[-1]
    table.leave_the_room(PeerId(last))
    table.wait(4.0)
    others = [name for name in "abc" if name != last]
    table.offer(*others)
    assert table.machine(others[0]).roster == tuple(others)
    assert table.machine(others[0]).view == 1


# ---- view changes ----


def test_a_lost_quorum_is_written_anew_after_the_time_of_a_silent_peer() -> None:
    table = Table("a", "b").start()
    table.leave_the_room(PeerId("a"))  # roster[0]: b alone is no quorum
    table.wait(15.0)
    assert table.machine("b").view == 1
    table.wait(15.0)
    assert (table.machine("b").view, table.machine("b").roster) == (2, ("b",))
    table.offer("b")
    assert contributors(table, "b") == ["b"]


def test_peers_that_have_never_had_a_round_together_do_not_go_on_alone() -> None:
    """Three homes whose lines lead to the bootstrap and not to each other each made a run of its own out of the first roster."""
    patient = replace(TIMING, first_degrade_s=200.0)
    table = Table("a", "b", timing=patient).start()
    table.leave_the_room(PeerId("a"))
    table.wait(5.0)
    table.offer("b")  # its own round is over, and there is nobody to agree with
    table.wait(180.0)
    assert table.machine("b").view == 1
    table.wait(30.0)
    assert (table.machine("b").view, table.machine("b").roster) == (2, ("b",))


def test_after_a_round_together_a_silent_peer_is_waited_for_as_ever() -> None:
    table = Table("a", "b", timing=replace(TIMING, first_degrade_s=200.0)).start()
    table.offer("a", "b")
    assert table.machine("b").round == 1
    table.leave_the_room(PeerId("a"))
    table.wait(40.0)
    assert (table.machine("b").view, table.machine("b").roster) == (2, ("b",))


def test_who_comes_back_before_the_first_round_follows_whoever_has_gone_on() -> None:
    """Where somebody can be followed, peers have met: the long wait before the first round is for those who never did."""
    table = Table("a", "b", "c", timing=replace(TIMING, first_degrade_s=600.0)).start()
    first = table.machine("b").head
    for name in "bc":
        table.leave_the_room(PeerId(name))
        table.give(PeerId("a"), PeerRefused(PeerId(name)))
    table.wait(8.0)
    assert (table.machine("a").view, table.machine("a").roster) == (2, ("a",))
    table.states_from = {PeerId("a")}
    table.sit(PeerId("b"), incarnation=2, stored_states={first})
    table.give(PeerId("b"), StateInstalled(first, b""))
    table.give(PeerId("a"), PeerFound(PeerId("b")))
    table.give(PeerId("b"), PeerRefused(PeerId("c")))
    table.wait(30.0)
    assert table.machine("b").head == table.machine("a").head
    assert table.machine("b").view == 2


def test_peers_that_refuse_connections_are_given_up_sooner() -> None:
    table = Table("a", "b").start()
    table.leave_the_room(PeerId("a"))
    table.give(PeerId("b"), PeerRefused(PeerId("a")))
    table.wait(8.0)
    assert table.machine("b").roster == ("b",)


def test_the_first_of_half_a_roster_goes_on_without_a_view_change() -> None:
    table = Table("a", "b").start()
    table.leave_the_room(PeerId("b"))
    table.offer("a")
    table.wait(20.0)
    assert (table.machine("a").view, contributors(table, "a")) == (1, ["a"])


def test_who_signed_a_view_change_votes_no_more_in_the_old_view() -> None:
    table = Table("a", "b", "c").start()
    first, second, third = table.by_rank()
    table.leave_the_room(PeerId(first))
    table.leave_the_room(PeerId(second))
    alone = table.machine(third)
    at, place = alone.sitting.seat.at(), alone.sitting.seat.place
    table.swallow = lambda sender, to, message: True
    table.wait(40.0)
    assert alone.view == 2
    value = place.round_value([], place.roster)
    table.give(PeerId(third), Received(PeerId(first), proposal(at, first, 0, value)))
    assert not table.said(third, Ack)
    assert table.said(third, ChainPage)[-1].certificates[0].view == 2


def test_a_working_roster_does_not_follow_the_call_of_one_that_hears_nobody() -> None:
    table = Table("a", "b", "c").start()
    deaf = PeerId(table.by_rank()[-1])
    table.mute = {(peer, deaf) for peer in table.machines if peer != deaf}
    table.wait(40.0)
    others = [name for name in "abc" if name != deaf]
    assert {table.machine(name).view for name in others} == {1}


def test_a_joiner_too_sees_that_offers_lead_to_nothing() -> None:
    table = Table("a", "b", "c").start()
    table.states_from = {PeerId(name) for name in "abc"}
    table.sit(PeerId("d"))
    table.wait(4.0)
    table.swallow = lambda sender, to, message: isinstance(message, Propose | Prepare)
    table.offer("a", "b", "c")
    table.wait(TIMING.degrade_s + 2 * TIMING.offer_wait_start_s)
    assert {(machine.view, machine.roster) for machine in table.machines.values()} == {(2, ("a", "b", "c"))}


def test_a_call_that_a_quorum_beside_us_does_not_answer_comes_to_nothing() -> None:
    table = Table("a", "b", "c").start()
    first = PeerId(table.by_rank()[0])
    table.swallow = lambda sender, to, message: (
        isinstance(message, Propose | Prepare) or (isinstance(message, ViewCall) and sender == first)
    )
    table.offer("a", "b", "c")
    table.wait(TIMING.degrade_s + 2 * TIMING.offer_wait_start_s + 2 * TIMING.view_wait_s)
    assert table.said(first, ViewCall)
    assert {machine.roster for machine in table.machines.values()} == {("a", "b", "c")}
    assert len(table.heads()) == 1


def test_view_changes_in_a_row_become_more_patient() -> None:
    """Thought of while reading: contributions slower than the patience would never arrive, each view makes them anew."""
    table = Table("a", "b", "c").start()
    table.swallow = lambda sender, to, message: isinstance(message, Propose | Prepare)
    moments: list[float] = []
    for _ in range(4):
        view = table.machine("a").view
        table.offer("a", "b", "c")
        began = table.now
        while table.machine("a").view == view:
            table.wait(1.0)
        moments.append(table.now - began)
    assert moments == sorted(moments)
    assert moments[-1] > 3 * moments[0]


# ---- other chains ----


def partitioned(*, rounds: int) -> Table:
    """a and b are a quorum and go on; c writes its own roster and offers alone. Then they meet."""
    table = Table("a", "b", "c").start()
    loner = PeerId("c")
    table.mute = {pair for name in "ab" for pair in ((PeerId(name), loner), (loner, PeerId(name)))}
    table.wait(60.0)
    for _ in range(rounds):
        table.offer("a", "b")
        table.offer("c")
        table.wait(20.0)
    assert table.machine("c").roster == ("c",)
    assert table.machine("a").roster == ("a", "b")
    table.mute = set()
    return table


def test_the_lighter_side_of_a_partition_adopts_the_heavier_and_counts_what_it_lost() -> None:
    table = partitioned(rounds=2)
    heavier = table.machine("a").head
    table.states_from = {PeerId("a"), PeerId("b")}
    table.wait(8.0)
    assert table.heads() == {heavier}
    (event,) = table.noted("c", BranchSwitched)
    assert (event.old_round, event.new_round, event.orphaned_contributions) == (2, 2, 2)
    assert table.did("c", FetchState)[-1].keep_pseudo_gradient
    table.offer("a", "b")
    table.wait(2.0)
    assert "c" in table.machine("a").roster


def test_who_claims_ever_new_heads_and_shows_none_does_not_keep_a_peer_from_the_others() -> None:
    """It was asked again whenever it had not answered for long enough: always, as it speaks more often than they do."""
    table = partitioned(rounds=2)
    heavier = table.machine("a").head
    table.states_from = {PeerId("a"), PeerId("b")}
    for number in range(200):
        claim = Heartbeat(0, sha256(bytes([number])), 1, 1, 99, 9, 999, 10, 0, False, b"")
        table.give(PeerId("c"), Received(PeerId("liar"), claim))
        table.wait(0.1)
    assert table.machine("c").head == heavier


def test_nothing_is_certified_while_a_better_chain_is_being_adopted() -> None:
    table = partitioned(rounds=2)
    table.wait(8.0)
    assert table.did("c", FetchState)
    assert not table.machine("c").is_ready
    before = table.machine("c").round
    table.offer("c")
    table.wait(5.0)
    assert table.machine("c").round == before


def test_certificates_that_come_during_a_state_fetch_are_applied_after_it() -> None:
    table = partitioned(rounds=2)
    table.wait(8.0)
    asked = table.did("c", FetchState)[-1]
    table.offer("a", "b")
    table.wait(2.0)
    table.give(PeerId("c"), StateInstalled(asked.head, asked.head))
    table.wait(2.0)
    assert len(table.heads()) == 1
    assert table.did("c", Apply)[-1].certificate.head == table.machine("a").head


def test_a_state_that_nobody_gives_does_not_stop_a_peer_for_ever() -> None:
    table = partitioned(rounds=2)
    for _ in range(60):
        table.wait(1.0)
        for asked in table.did("c", FetchState):
            table.give(PeerId("c"), StateMissing(asked.head))
        table.offer("c")
        if table.machine("c").round > 2:
            break
    assert table.machine("c").round > 2


def test_half_of_a_better_branch_is_not_adopted() -> None:
    """Found by seed 289: a donor was at a head in the middle of the better branch, where it was lighter than ours."""
    table = partitioned(rounds=2)
    machine = table.machine("c")
    foreign = table.machine("a").chain
    at_middle = next(each for each in foreign if each.value.round == 1)
    assert at_middle.value.weight == machine.chain[-1].value.weight
    middle = [each for each in foreign if each.value.weight < machine.chain[-1].value.weight][-1]
    table.swallow = lambda sender, to, message: not isinstance(message, GetChain | ChainPage)
    beat = Heartbeat(0, foreign[-1].head, 1, 1, 9, 2, 4, 3, 0, False, b"")
    table.give(PeerId("c"), Received(PeerId("a"), beat))
    table.give(PeerId("c"), Received(PeerId("b"), replaced(beat, head=middle.head, ready=True)))
    table.wait(2.0)
    assert not any(asked.head == middle.head for asked in table.did("c", FetchState))


def test_a_foreign_chain_longer_than_the_run_can_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody can sign a chain of his own roster, page after page; it would be kept until the memory is full."""
    monkeypatch.setattr("dilocox_peer.peer.planning.plan.SPARE_VIEWS", 30)
    table = Table("a", "b", total_rounds=1).start()  # of 8 steps: at most 8 rounds
    machine, liar = table.machine("a"), PeerId("liar")
    place, reasons, tips = machine.sitting.seat.place, [], []
    for _ in range(5):
        page = []
        for _ in range(16):
            value = place.view_change([liar])
            signature = vote_for(acceptance(0, place.head, place.view + 1, 0, value), 1, signer(liar))
            page.append(Certificate(0, place.head, place.view + 1, 0, value, ((liar, signature),)))
            place = place.then(page[-1])
        tips.append(place.head)
        reasons += refusals(table, "a", liar, ChainPage(0, place.head, place.view, tuple(page), True))
    assert reasons == ["a chain of more than 46 certificates beyond ours; this run has not so many"]
    kept = table.said("a", GetChain)[-1].locator
    assert [tip for tip in tips if tip in kept] == [tips[1]]


def test_a_peer_that_missed_the_certificate_asks_and_applies_it() -> None:
    table = Table("a", "b", "c").start()
    late = table.by_rank()[-1]
    table.swallow = lambda sender, to, message: isinstance(message, Cert | ChainPage) and to == late
    table.offer("a", "b", "c")
    assert table.machine(late).round == 0
    table.swallow = lambda sender, to, message: False
    table.wait(6.0)
    assert len(table.heads()) == 1
    assert table.did(late, Apply)[-1].own is not None
    assert not table.did(late, FetchState)


def test_a_certificate_whose_blobs_are_gone_is_reached_by_a_whole_state() -> None:
    table = Table("a", "b", "c").start()
    late = PeerId(table.by_rank()[-1])
    others = [peer for peer in table.machines if peer != late]
    table.states_from = set(others)
    table.mute = {pair for peer in others for pair in ((peer, late), (late, peer))}
    table.offer(*others)
    table.wait(8.0)
    for peer in others:
        table.blobs[peer].clear()
    table.mute = set()
    table.wait(12.0)
    assert len(table.heads()) == 1
    assert table.did(late, FetchState)


def test_a_blob_that_our_disk_lost_before_it_was_applied_is_fetched_again() -> None:
    table = Table("a", "b", "c").start()
    entries = table.offer("a", "b", "c")
    lost, certificate = entries[PeerId("b")].blob, table.machine("c").chain[-1]
    table.blobs[PeerId("c")].discard(lost)
    table.give(PeerId("c"), BlobLost(lost, certificate))
    assert (table.did("c", FetchBlob)[-1].blob, lost in table.blobs[PeerId("c")]) == (lost, True)
    table.wait(60.0)
    assert not table.did("c", FetchState)


def test_a_blob_that_everybody_lost_is_made_up_for_by_a_whole_state() -> None:
    table = Table("a", "b", "c").start()
    lost, certificate = table.offer("a", "b", "c")[PeerId("b")].blob, table.machine("c").chain[-1]
    table.states_from = {PeerId("a"), PeerId("b")}
    for blobs in table.blobs.values():
        blobs.discard(lost)
    table.give(PeerId("c"), BlobLost(lost, certificate))
    table.wait(4 * TIMING.blob_retry_s)
    assert [(asked.head, asked.keep_pseudo_gradient) for asked in table.did("c", FetchState)] == [
        (certificate.head, False)
    ]
    assert table.machine("c").is_ready


def test_a_peer_whose_anchor_is_not_the_certified_one_fetches_the_state() -> None:
    table = Table("a", "b", "c").start()
    table.offer("a", "b", "c")
    table.anchors[PeerId("b")] = sha256(b"drifted")
    table.offer("a", "b", "c")
    assert table.machine("b").state_digest == sha256(b"drifted")
    del table.anchors[PeerId("b")]
    table.states_from = {PeerId("a"), PeerId("c")}
    table.offer("a", "b", "c")
    table.wait(4.0)
    assert set(table.did("b", FetchState)[-1].donors) <= {"a", "c"}
    assert len(table.heads()) == 1
    assert table.machine("b").state_digest == table.machine("a").state_digest


# ---- restarting and ending ----


def test_a_restarted_peer_replays_from_the_newest_state_on_its_disk() -> None:
    table = Table("a").start()
    heads = []
    for _ in range(4):
        table.offer("a")
        heads.append(table.machine("a").head)
    machine = table.sit(PeerId("a"), incarnation=2, stored_states={GENESIS, heads[1]})
    assert table.did("a", FetchState)[-1] == FetchState(heads[1], 2, b"", (), False)
    assert not machine.is_ready
    table.give(PeerId("a"), StateInstalled(heads[1], heads[1]))
    assert [action.certificate.head for action in table.did("a", Apply)] == heads[2:]
    assert all(action.own is None for action in table.did("a", Apply))
    assert machine.is_ready
    table.offer("a", incarnation=2)
    assert machine.round == 5


def test_no_round_follows_the_last_and_late_peers_still_reach_it() -> None:
    table = Table("a", "b", total_rounds=2).start()
    for _ in range(4):
        table.offer("a", "b")
    assert table.machine("a").round == 2
    assert table.machine("a").schedule.is_over
    assert not table.machine("a").has_offered
    table.states_from = {PeerId("a"), PeerId("b")}
    table.sit(PeerId("c"))
    table.wait(6.0)
    assert table.machine("c").schedule.is_over


def test_old_blobs_are_forgotten_and_new_ones_are_not() -> None:
    table = Table("a", timing=replace(TIMING, keep_rounds=3)).start()
    blobs = [table.offer("a")[PeerId("a")].blob for _ in range(6)]
    forgotten = [blob for action in table.did("a", ForgetBlobs) for blob in action.blobs]
    assert forgotten == blobs[:3]


def test_an_old_blob_that_is_offered_again_is_there_to_be_merged() -> None:
    """Any peer of the roster may offer what everybody holds; forgotten as it was certified, it would end them all."""
    table = Table("a", "b", timing=replace(TIMING, keep_rounds=3)).start()
    first = table.offer("a", "b")[PeerId("a")].blob
    for _ in range(2):
        table.offer("a", "b")
    machine = table.machine("b")
    table.give(PeerId("b"), Closed(machine.head, Entry(PeerId("b"), 1, first, 10, 8, machine.state_digest)))
    table.offer("a")
    certified = {entry.blob for entry in table.did("a", Apply)[-1].certificate.value.entries}
    assert first in certified
    assert not {blob for action in table.did("a", ForgetBlobs) for blob in action.blobs} & certified
    for _ in range(4):
        table.offer("a", "b")
    assert first in {blob for action in table.did("a", ForgetBlobs) for blob in action.blobs}


def test_old_blobs_from_before_a_restart_are_forgotten_too() -> None:
    table = Table("a", timing=replace(TIMING, keep_rounds=3)).start()
    blobs = [table.offer("a")[PeerId("a")].blob for _ in range(3)]
    never_certified = sha256(b"offered, and the head moved")
    machine = table.sit(PeerId("a"), 2, stored_states={table.machine("a").head}, stored_blobs={*blobs, never_certified})
    table.give(PeerId("a"), StateInstalled(machine.head, b""))
    blobs += [table.offer("a", incarnation=2)[PeerId("a")].blob for _ in range(3)]
    forgotten = [blob for action in table.did("a", ForgetBlobs) for blob in action.blobs]
    assert sorted(forgotten) == sorted([*blobs[:3], never_certified])


def test_the_durable_chain_is_the_chain() -> None:
    table = Table("a", "b").start()
    for _ in range(3):
        table.offer("a", "b")
    loaded = load_log(table.logs[PeerId("a")], GENESIS).durable
    assert isinstance(loaded, Durable)
    assert list(loaded.appended) == list(table.machine("a").chain)


def test_more_peers_than_are_remembered_end_nobody() -> None:
    table = Table("a", "b").start()
    table.wait(TIMING.heartbeat_s * 2)
    greeting = table.said("b", Heartbeat)[-1]
    for number in range(MAX_KNOWN + 100):
        if number == 100:
            table.wait(TIMING.heartbeat_s * 2)
        table.now += 0.001
        table.give(PeerId("a"), Received(PeerId(f"stranger {number}"), greeting))
    table.wait(TIMING.heartbeat_s * 2)
    lost = {event.peer for event in table.noted("a", NeighbourLost)}
    assert PeerId("stranger 0") in lost
    assert PeerId("b") not in lost, "who votes is not forgotten for them"


# ---- what the session reads ----


def test_reports_name_the_round_in_training_and_the_work_done() -> None:
    table = Table("a", "b").start()
    table.give(PeerId("a"), RoundProgress(5))
    table.wait(1.5)
    assert table.machine("b").reports[PeerId("a")] == (1, 5)
    table.swallow = lambda sender, to, message: isinstance(message, Propose | Prepare)
    table.offer("a")
    table.wait(1.5)
    assert table.machine("b").reports[PeerId("a")] == (2, 0)


@pytest.mark.parametrize("paused", ["a", "b", "c"])  # one of them leads
def test_a_paused_peer_that_did_nothing_is_not_waited_for_and_votes_all_the_same(paused: str) -> None:
    table = Table("a", "b", "c").start()
    table.give(PeerId(paused), RoundProgress(0, paused=True))
    began = table.now
    others = [name for name in "abc" if name != paused]
    table.offer(*others)
    certificate = table.machine("a").chain[-1]
    assert [entry.peer for entry in certificate.value.entries] == others
    assert table.now == began, "no time went by"
    assert set(certificate.value.roster) == {"a", "b", "c"}, "it stays"
    table.wait(1.5)
    assert {machine.head for machine in table.machines.values()} == {certificate.head}


def test_what_a_peer_had_trained_before_it_paused_is_waited_for() -> None:
    table = Table("a", "b", "c").start()
    table.give(PeerId("c"), RoundProgress(3, paused=True))
    height = len(table.machine("a").chain)
    table.offer("a", "b")
    assert len(table.machine("a").chain) == height
    table.offer("c")
    assert len(table.machine("a").chain[-1].value.entries) == 3


def test_who_pauses_is_here_and_not_at_work_and_says_so_at_once() -> None:
    table = Table("a", "b").start()
    assert table.machine("b").working(table.now) == {"a", "b"}
    table.give(PeerId("a"), RoundProgress(0, paused=True))
    for name in ("a", "b"):
        assert table.machine(name).alive(table.now) == {"a", "b"}
        assert table.machine(name).working(table.now) == {"b"}
    table.give(PeerId("a"), RoundProgress(0, paused=False))
    assert table.machine("b").working(table.now) == {"a", "b"}


def test_silence_of_three_heartbeats_is_absence() -> None:
    table = Table("a", "b").start()
    assert table.machine("a").alive(table.now) == {"a", "b"}
    table.leave_the_room(PeerId("b"))
    table.wait(TIMING.alive_s + 1.5)
    assert table.machine("a").alive(table.now) == {"a"}


def test_the_plan_of_a_round_is_in_the_certificate_two_rounds_before() -> None:
    table = Table("a").start()
    table.offer("a")
    assert table.machine("a").schedule.plan_for(1) == PLAN
    assert table.machine("a").schedule.plan_for(3) == table.machine("a").chain[-1].value.plan


def test_ticking_early_does_no_harm() -> None:
    table = Table("a", "b").start()
    before = len(table.done[PeerId("a")])
    for _ in range(20):
        table.give(PeerId("a"), Tick())
    assert len(table.done[PeerId("a")]) == before


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_rounds_go_on_among_any_number_of_peers(size: int) -> None:
    names = [chr(ord("a") + number) for number in range(size)]
    table = Table(*names).start()
    for expected in range(1, 6):
        table.offer(*names)
        assert {machine.round for machine in table.machines.values()} == {expected}
    assert len(table.heads()) == 1


def test_what_strangers_say_of_the_last_state_counts_nothing_beside_the_roster() -> None:
    """No certificate names the digest of the run's last state: more identities than the roster has would decide it."""
    table = Table("a", "b", "c", total_rounds=2).start()
    table.offer("a", "b", "c")
    table.offer("a", "b", "c")
    finished = table.machine("a")
    assert finished.schedule.is_over
    newcomer, place, forged = PeerId("n"), finished.chain[-1], sha256(b"forged")
    for blobs in table.blobs.values():
        blobs.clear()  # too old to be merged one after another
    table.sit(newcomer)
    table.wait(3.0)  # it hears the others; nobody gives it a state yet
    for _ in range(5):
        for number in range(5):
            stranger = PeerId(f"stranger{number}")
            table.give(newcomer, PeerFound(stranger), Received(stranger, Heartbeat(
                0, place.head, place.view, incarnation=1, height=place.value.height, round=place.value.round,
                weight=place.value.weight, training_round=3, micro_batches=0, ready=True, state_digest=forged,
            )))  # fmt: skip
        table.wait(1.0)
    asked = [action for action in table.did("n", FetchState) if action.donors]
    assert asked
    assert {action.state_digest for action in asked} == {finished.state_digest}
    assert {peer for action in asked for peer in action.donors} == {"a", "b", "c"}
    table.give(newcomer, StateInstalled(place.head, finished.state_digest))
    assert table.machine("n").schedule.is_over
