"""Planted faults: each is a mistake one could make in the protocol. The simulator must catch every one of them.

A fault that no seed catches would mean that the simulator does not look where the mistake is.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from unittest.mock import patch

from dilocox_peer.peer.rounds import chain, forks, view_changes
from dilocox_peer.peer.rounds import seat as seats_of_a_head
from dilocox_peer.peer.rounds.ballots import Ballots
from dilocox_peer.peer.rounds.chain import Place, Suffix
from dilocox_peer.peer.rounds.contract import Action, FetchState, Input, Persist
from dilocox_peer.peer.rounds.following import Following
from dilocox_peer.peer.rounds.forks import Forks
from dilocox_peer.peer.rounds.jury import Jury
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.replay import Replay
from dilocox_peer.peer.rounds.seat import Seat
from dilocox_peer.peer.rounds.sitting import Sitting
from dilocox_peer.peer.rounds.view_changes import ViewChanges
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate, Value
from dilocox_peer.wire.checkpoints import Checkpoint
from dilocox_peer.wire.rounds import Accepted


class _Credulous(Jury):
    """Asks no leader for its promises: a member that does accepts nothing of one that ignores them."""

    def why_not_justified(self, ballot, value, promises):
        return None


class _IgnoresAccepted(Ballots):
    def _forced_value(self, promises: Mapping[PeerId, Accepted | None]) -> Value | None:
        return None

    jury_type = _Credulous


class AcksEarly(Ballots):
    def _may_accept(self, value: Value) -> bool:
        return True


class _ForgetsToPersist(Ballots):
    def _backed(self, persist: Action) -> list[Action]:
        return []


class _ForgetsPromise(Ballots):
    """Promises in memory only."""

    def on_prepare(self, sender, message, now):
        actions, reason = super().on_prepare(sender, message, now)
        return [action for action in actions if not isinstance(action, Persist)], reason


class _SignsViewChangesUnbacked(ViewChanges):
    def _backed(self, persist: Action) -> list[Action]:
        return []


class _NeverCallsViewChanges(ViewChanges):
    def advance(self, now: float) -> list[Action]:
        return super().advance(now) if self._seat.place.is_genesis else []


class _KeepsPseudoGradient(RoundMachine):
    """Keeps its pseudo-gradient over every branch switch, also where it is in the new branch already."""

    def handle(self, event: Input, now: float, *, more: bool = False) -> list[Action]:
        return [
            replace(action, keep_pseudo_gradient=True) if isinstance(action, FetchState) and action.donors else action
            for action in super().handle(event, now, more=more)
        ]


class _ReplaysWithoutBlobs(Replay):
    def is_here(self, certificate: Certificate) -> bool:
        return True


class _AppliesWithoutBlobs(RoundMachine):
    replay_type = _ReplaysWithoutBlobs


def _with(
    name: str, *, ballots_: type[Ballots] = Ballots, view_changes_: type[ViewChanges] = ViewChanges
) -> type[RoundMachine]:
    faulty = type("Faulty", (Sitting,), {"ballots_type": ballots_, "view_changes_type": view_changes_})
    return type(name, (RoundMachine,), {"sitting_type": faulty})


FAULTS: dict[str, type[RoundMachine]] = {
    "a leader that ignores accepted values": _with("IgnoresAccepted", ballots_=_IgnoresAccepted),
    "ACK before holding the blobs": _with("AcksEarly", ballots_=AcksEarly),
    "ACK without Persist": _with("ForgetsToPersist", ballots_=_ForgetsToPersist),
    "PROMISE without Persist": _with("ForgetsPromise", ballots_=_ForgetsPromise),
    "VIEW signature without Persist": _with("SignsViewChangesUnbacked", view_changes_=_SignsViewChangesUnbacked),
    "no view change after genesis": _with("NeverCallsViewChanges", view_changes_=_NeverCallsViewChanges),
    "pseudo-gradient kept over every switch": _KeepsPseudoGradient,
    "applied without its blobs": _AppliesWithoutBlobs,
}


def _any_peer(peers: Collection[PeerId], roster: Sequence[PeerId]) -> bool:
    return any(peer in peers for peer in roster)


def _any_half(peers: Collection[PeerId], roster: Sequence[PeerId]) -> bool:
    return bool(roster) and 2 * sum(1 for peer in roster if peer in peers) >= len(roster)


def _is_member(seat: Seat) -> bool:
    return seat.is_member


def _any_branch(forks: Forks, left: Suffix | None, right: Suffix | None) -> bool:
    return True


def _heavier(self: Forks, left: Suffix | None, right: Suffix | None) -> bool:
    """The rule before this one: more signatures and contributions are better."""
    own = self._chain.place.weight
    return (left.certificates[-1].value.weight if left else own) > (
        right.certificates[-1].value.weight if right else own
    )


@contextmanager
def votes_after_views() -> Iterator[None]:
    with patch.object(Seat, "may_vote", property(_is_member)):
        yield


@contextmanager
def adopts_half_branches() -> Iterator[None]:
    with patch.object(Forks, "is_better", _any_branch):
        yield


@contextmanager
def weight_counts() -> Iterator[None]:
    with patch.object(Forks, "is_better", _heavier), patch.object(Forks, "why_not", lambda forks, suffix: None):
        yield


PATCHES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "votes in a view change after it signed a newer one": votes_after_views,
    "any branch is better": adopts_half_branches,
    "weight counts signatures": weight_counts,
}
QUORUM_FAULTS = {"a quorum of one": _any_peer, "half without tie-break": _any_half}


@contextmanager
def wrong_quorum(rule) -> Iterator[None]:
    """The protocol under test counts quorums by this rule; the invariants keep the right one."""
    with (
        patch.object(chain, "is_quorum", rule),
        patch.object(seats_of_a_head, "is_quorum", rule),
        patch.object(view_changes, "is_quorum", rule),
    ):
        yield


@contextmanager
def any_signature_of_a_checkpoint() -> Iterator[None]:
    with patch.object(Checkpoint, "why_not", lambda checkpoint, **terms: None):
        yield


@contextmanager
def electors_are_whoever_signed() -> Iterator[None]:
    """Support is counted among all signers, not in the last common roster."""

    def counted(electors: Sequence[PeerId], branches: Mapping[Digest, Mapping[PeerId, int]]) -> dict[Digest, list[int]]:
        return {head: list(range(len(votes))) for head, votes in branches.items()}

    with patch.object(forks, "supporters", counted):
        yield


@contextmanager
def newcomers_make_rosters_beside_members() -> Iterator[None]:
    """A view change that nobody of the roster signed is followed like another."""

    def allowed(_following: Following, path: Suffix | None, _view_changes: ViewChanges, _now: float) -> Suffix | None:
        return path

    with patch.object(Following, "allowed", allowed):
        yield


@contextmanager
def anybody_starts_the_run() -> Iterator[None]:
    with patch.object(Place, "founder_alone", lambda place, kind, signers: True):
        yield


HOSTILE_FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "weight counts signatures": weight_counts,
    "support is counted among all signers": electors_are_whoever_signed,
    "a checkpoint of anybody's": any_signature_of_a_checkpoint,
    "a view change at our head is followed at once": newcomers_make_rosters_beside_members,
    "anybody starts the run": anybody_starts_the_run,
}
