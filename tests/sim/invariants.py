"""The invariants of docs/protocol.md, checked as things happen. A violation ends the run.

I1 one certificate of a quorum per (head, view). I2 a chain grows on its head. I9 nobody leaves a branch that a quorum of the
roster where it begins stands on, by the latest vote of each.
I3 whoever signed held every blob and had made it durable. I4 no pseudo-gradient twice in a chain. I5 pseudo-gradient = settled +
pending + orphaned. I8 a live quorum certifies within as many ballots as its roster has members, and one more for
each of them that another has put off, as that one does not wait for its turn; from `quiet` on.

Not here: I7 is about time (scenario.py). I6, decode(own) + residual' = pseudo-gradient sent + residual, is about numbers, which
the toy training of world.py has none of: tests/unit/test_outer.py holds the real outer loop and codecs to it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from dilocox_peer.events import Event, MemberDoubted
from dilocox_peer.peer.planning.plan import PlanBounds
from dilocox_peer.peer.rounds.chain import Place, Verifier, is_quorum, order_of
from dilocox_peer.peer.rounds.contract import AverageSlice, FetchBlob
from dilocox_peer.peer.rounds.durable import Durable, Votes
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate, Plan, Value
from dilocox_peer.wire.checkpoints import Checkpoint
from dilocox_peer.wire.rounds import Ack, Averages, Cert, Message, Prepare, Promise, Propose, ViewSign

if TYPE_CHECKING:
    from .world import Node, Unit


IN_FLIGHT_S = 0.5


class Violation(AssertionError):
    """An invariant does not hold."""


class Invariants:
    """What all peers of a world have ever certified, and what each has promised."""

    def __init__(
        self,
        genesis: Digest,
        plan: Plan,
        verify: Verifier,
        bounds: Callable[[], PlanBounds],
        is_honest: Callable[[PeerId], bool],
        now: Callable[[], float],
    ) -> None:
        """plan: of the second round. bounds: what later ones may be."""
        self._now = now
        self._bounds = bounds
        self._is_honest = is_honest
        self.is_captured = False  # whether a roster was ever adopted in which the honest are no quorum
        self._verify = verify
        self._genesis, self._plan = genesis, plan
        self._places: dict[Digest, Place] = {genesis: Place.genesis(0, genesis, plan)}
        self._vouched: list[Digest] = []
        self._parents: dict[Digest, Digest] = {}
        self._all: dict[Certificate, float] = {}  # and when each was first seen
        self._certified: dict[tuple[Digest, int], Certificate] = {}
        self.forks = 0  # two certificates of one ballot place, which took a hostile signature under both
        self._view_changes: dict[tuple[Digest, int], list[tuple[PeerId, ...]]] = {}
        self._durable: dict[PeerId, tuple[Digest, Votes]] = {}
        self._accepted_in: dict[tuple[PeerId, Digest, int, int], Digest] = {}
        self._signed_views: dict[tuple[PeerId, Digest, int], Digest] = {}
        self._at: dict[PeerId, Digest] = {}
        self._settled: dict[PeerId, tuple[frozenset[Unit], set[Unit], int, int]] = {}
        self.events: list[tuple[PeerId, Event]] = []
        self.rounds = 0
        self.sliced = 0  # of these, in slices
        self.fetches: dict[str, int] = {}
        self.num_averaged = 0
        self.lost_residuals = 0  # results that went on without the residual of the one before
        self.max_ballot = 0
        self._led: dict[tuple[Digest, int], set[int]] = {}  # ballots in which somebody asked, by (head, view)
        self._is_quiet = False
        self.max_quiet_ballots = 0

    def begin(self, genesis: Place) -> None:
        """Where all chains begin."""
        self._places[self._genesis] = genesis

    def vouched(self, checkpoint: Checkpoint) -> None:
        """The owner has signed a checkpoint: it follows the one before."""
        path = self._path(checkpoint.head)
        if any(head not in path for head in self._vouched):
            raise Violation("the owner has vouched for two branches")
        self._vouched.append(checkpoint.head)

    def started(self, node: "Node") -> None:
        assert node.machine is not None
        self._at[node.peer] = node.machine.head
        on_disk = self._durable.get(node.peer)
        if on_disk is not None and on_disk[0] != node.machine.head:
            raise Violation(f"durability: {node.peer} restarted at another head than the one it made durable")

    # ---- averaging in slices ----

    def fetched(self, node: "Node", action: FetchBlob, blob: bytes) -> None:
        """Counts what is sent, by kind."""
        kind = "whole" if action.part is None else action.part.kind
        self.fetches[kind] = self.fetches.get(kind, 0) + 1

    def averaged(self, node: "Node", action: AverageSlice) -> None:
        self.num_averaged += 1

    def noted(self, node: "Node", event: Event) -> None:
        if not self._is_honest(node.peer):
            return
        self.events.append((node.peer, event))

    # ---- I8 ----

    def quiet(self) -> None:
        """From now on a live quorum is there, and ballots are counted: those in which somebody asks. Their numbers say
        less, as a leader that asks again skips the numbers of the others, and old numbers are used up."""
        self._led.clear()
        self._is_quiet = True

    def _check_ballots(self, certificate: Certificate, roster: tuple[PeerId, ...]) -> None:
        num_ballots = len(self._led.get((certificate.parent, certificate.view), ()))
        if not self._is_quiet:
            return
        self.max_quiet_ballots = max(self.max_quiet_ballots, num_ballots)
        doubted = {event.peer for _, event in self.events if isinstance(event, MemberDoubted) and event.rounds}
        # One of few, to which two are bound by their votes, is put off until the others have had their time to lead: whoever's turn is next asks meanwhile.
        is_of_few = 0 < 2 * len(certificate.value.entries) < len(roster)
        if num_ballots > len(roster) + len(doubted.intersection(roster)) + is_of_few:
            raise Violation(f"I8: certified after {num_ballots} ballots by a roster of {len(roster)}")

    # ---- I1, I2 ----

    def persists(self, node: "Node", durable: Durable) -> None:
        for certificate in durable.appended:
            self.certified(certificate)
        head = durable.votes.head
        old = self._at[node.peer]
        if head != old:
            self._check_move(node, old, head)
            self._at[node.peer] = head
        self._durable[node.peer] = (head, durable.votes)

    def certified(self, certificate: Certificate) -> None:
        if certificate.head not in self._places or certificate not in self._all:
            self._all[certificate] = self._now()
        if certificate.head in self._places:
            return
        place = self._places.get(certificate.parent)
        if place is None:
            raise Violation("I2: a certificate on a head nobody has")
        reason = place.why_not_certificate(certificate, self._verify, 64, self._bounds())
        if reason is not None:
            raise Violation(f"a certificate that does not verify: {reason}")
        if place.founder is not None and [peer for peer, _ in certificate.signatures] != [place.founder]:
            raise Violation("a run that somebody else than its owner has begun")
        key = (certificate.parent, certificate.view)
        if certificate.value.kind == "round":
            # Not is_quorum of the code under test alone: count again.
            signers = {peer for peer, _ in certificate.signatures}
            voters = place.voters
            here = len(signers & set(voters))
            tie = 2 * here == len(voters) and voters[0] in signers
            if not (2 * here > len(voters) or tie):
                raise Violation(f"I1: certified by {here} of {len(voters)}")
            first = self._certified.setdefault(key, certificate)
            if first.head != certificate.head:
                # What a quorum of honest peers has signed stays the only one, whatever the others sign.
                if any(is_quorum(self._honest_signers(head), voters) for head in (first.head, certificate.head)):
                    raise Violation(f"I1: two certificates on one head in view {certificate.view}")
                self.forks += 1
            self.rounds += 1
            self.sliced += bool(certificate.value.results)
            for index, result in enumerate(certificate.value.results):
                assert place.sharing is not None, "results of a run that averages all to all"
                self.lost_residuals += result.base != place.sharing.base(index)
            self.max_ballot = max(self.max_ballot, certificate.ballot)
            self._check_ballots(certificate, place.voters)
        else:
            rosters = self._view_changes.setdefault(key, [])
            if any(self._is_honest(peer) for roster in rosters for peer in set(roster) & set(certificate.value.roster)):
                raise Violation("I1: a peer is in two view changes of one number on one head")
            rosters.append(certificate.value.roster)
        after = self._places[certificate.head] = place.then(certificate)
        self.is_captured |= not is_quorum({peer for peer in after.voters if self._is_honest(peer)}, after.voters)
        self._parents[certificate.head] = certificate.parent

    def _honest_signers(self, head: Digest) -> set[PeerId]:
        return {
            peer
            for certificate in self._all
            if certificate.head == head
            for peer, _ in certificate.signatures
            if self._is_honest(peer)
        }

    def _check_move(self, node: "Node", old: Digest, new: Digest) -> None:
        before, after = self._path(old), self._path(new)
        if after[: len(before)] == before:
            self._check_extension(node, after[len(before) :])
            return
        shared = 0
        while shared < len(after) and before[shared] == after[shared]:
            shared += 1
        place = self._places[before[shared - 1] if shared else self._genesis]
        if any(head in after[shared:] for head in self._vouched):
            return  # the owner's word goes before votes
        latest = self._latest_votes(place.electors, place.head)
        stay, go = (
            [position for position, peer in enumerate(place.electors) if latest.get(peer) == side[shared]]
            if side[shared:]
            else []
            for side in (before, after)
        )
        electors = place.electors
        if is_quorum({electors[position] for position in stay if self._is_honest(electors[position])}, electors):
            raise Violation(
                f"I9: {node.peer} left a branch that {len(stay)} of {len(electors)} stand on for one with {len(go)}"
            )

    def _check_extension(self, node: "Node", heads: list[Digest]) -> None:
        """A voter does not go along with a roster that none of the voters has signed."""
        for head in heads:
            place = self._places[self._parents[head]]
            votes = {peer for each in self._all if each.head == head for peer, _ in each.signatures}
            if node.peer in place.voters and head not in self._vouched and not votes & set(place.voters):
                raise Violation(f"I9: {node.peer}, a voter, followed a roster that no voter signed")

    def _latest_votes(self, electors: tuple[PeerId, ...], head: Digest) -> dict[PeerId, Digest]:
        """Where each elector stands by its latest vote in any certificate there is: the first head of that branch after
        head. The reference that the protocol's own count is held to: it looks at all certificates ever made, but for those that
        may still be on their way, or came while a state was being installed."""
        standing: dict[PeerId, tuple[int, Digest]] = {}
        for certificate, made_at in self._all.items():
            if made_at > self._now() - IN_FLIGHT_S:
                continue
            path = self._path(certificate.head)
            start = 0 if head == self._genesis else (path.index(head) + 1 if head in path else len(path))
            if start >= len(path):
                continue
            for peer, vote in certificate.signatures:
                if peer in electors:
                    standing[peer] = max(standing.get(peer, (-1, path[start])), (order_of(vote), path[start]))
        return {peer: first for peer, (_, first) in standing.items()}

    def _path(self, head: Digest) -> list[Digest]:
        path = []
        while head != self._genesis:
            path.append(head)
            head = self._parents[head]
        path.reverse()
        return path

    # ---- I3, and what must be durable before it is said ----

    def sends(self, node: "Node", message: Message) -> None:
        if not self._is_honest(node.peer):
            if isinstance(message, Cert):
                self.certified(message.certificate)
            return
        match message:
            case Ack():
                self._check_backed(node, message.head, message.view, message.ballot, message.value)
            case Propose():
                self._lead(message)
                self._check_backed(node, message.head, message.view, message.ballot, message.value.digest())
            case Prepare():
                self._lead(message)
            case Promise():
                _, votes = self._durable.get(node.peer, (None, None))
                if votes is None or votes.head != message.head or votes.promised < message.ballot:
                    raise Violation(f"{node.peer} promised ballot {message.ballot} without making it durable")
                earlier = [
                    ballot
                    for (peer, head, view, ballot) in self._accepted_in
                    if (peer, head, view) == (node.peer, message.head, message.view) and ballot < message.ballot
                ]
                said = -1 if message.accepted is None else message.accepted.ballot
                if earlier and max(earlier) > said:
                    raise Violation(f"{node.peer} forgot what it accepted in ballot {max(earlier)}")
            case Averages():
                for average in message.averages:
                    if not {average.blob, average.residual} <= node.disk.blobs.keys():
                        raise Violation(
                            f"{node.peer} vouched for slice {average.slice} without holding it and what it lost"
                        )
            case ViewSign():
                self._check_view_change(node, message.head, message.number, message.value)
            case Cert():
                self.certified(message.certificate)
            case _:
                pass

    def _lead(self, message: Propose | Prepare) -> None:
        self._led.setdefault((message.head, message.view), set()).add(message.ballot)

    def _check_backed(self, node: "Node", head: Digest, view: int, ballot: int, digest: Digest) -> None:
        _, votes = self._durable.get(node.peer, (None, None))
        accepted = votes.accepted if votes is not None and votes.head == head else None
        if accepted is None or accepted.ballot != ballot or accepted.value.digest() != digest:
            raise Violation(f"I3: {node.peer} accepted in ballot {ballot} without making it durable")
        if votes is not None and votes.view_change_signed > view:
            raise Violation(f"{node.peer} voted in view {view} after it signed view {votes.view_change_signed}")
        self._check_holds(node, accepted.value)
        key = (node.peer, head, view, ballot)
        if self._accepted_in.setdefault(key, digest) != digest:
            raise Violation(f"{node.peer} accepted two values in ballot {ballot}")

    def _check_holds(self, node: "Node", value: Value) -> None:
        if any(name not in node.disk.blobs for name in value.blobs):
            raise Violation(f"I3: {node.peer} accepted a value without holding its blobs")

    def _check_view_change(self, node: "Node", head: Digest, number: int, digest: Digest) -> None:
        _, votes = self._durable.get(node.peer, (None, None))
        if votes is None or votes.head != head or votes.view_change_signed != number:
            raise Violation(f"{node.peer} signed view {number} without making it durable")
        if self._signed_views.setdefault((node.peer, head, number), digest) != digest:
            raise Violation(f"{node.peer} signed two view changes {number} on one head")

    # ---- I5 ----

    def after_event(self, node: "Node") -> None:
        if node.anchor is None or not self._is_honest(node.peer):
            return
        settled = self._count_settled(node.peer, node.anchor.units, node.produced)
        if settled + len(node.pending) + len(node.orphaned) != len(node.produced):
            raise Violation(
                f"I5: {node.peer} made {len(node.produced)} units: {settled} settled, {len(node.pending)} pending, "
                f"{len(node.orphaned)} orphaned"
            )

    def _count_settled(self, peer: PeerId, anchored: "frozenset[Unit]", produced: "set[Unit]") -> int:
        """Of what peer has produced. Counted anew where either has changed since; from produced nothing is ever taken away."""
        known = self._settled.get(peer)
        if known is None or known[0] is not anchored or known[1] is not produced or known[2] != len(produced):
            known = self._settled[peer] = anchored, produced, len(produced), len(anchored & produced)
        return known[3]

    def is_live_quorum(self, roster: tuple[PeerId, ...], up: set[PeerId]) -> bool:
        return is_quorum(up, roster)
