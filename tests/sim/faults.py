"""Planted faults: each is a mistake one could make in the protocol. The simulator must catch every one of them.

A fault that no seed catches would mean that the simulator does not look where the mistake is.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from unittest.mock import patch

from dilocox_peer.peer.rounds import anchorage, ballots, chain, epochs
from dilocox_peer.peer.rounds.ballots import Ballots
from dilocox_peer.peer.rounds.chain import Certificate, Chain, Suffix, Value
from dilocox_peer.peer.rounds.contract import Action, FetchState, Input, Persist
from dilocox_peer.peer.rounds.durable import Accepted
from dilocox_peer.peer.rounds.epochs import Epochs
from dilocox_peer.peer.rounds.jury import Jury
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.seat import Seat
from dilocox_peer.types import PeerId


class _Credulous(Jury):
    """Asks no leader for its promises: a member that does accepts nothing of one that ignores them."""

    def why_not_justified(self, ballot, value, promises):  # type: ignore[no-untyped-def]
        return None


class _IgnoresAccepted(Ballots):
    def _forced_value(self, promises: Mapping[PeerId, Accepted | None]) -> Value | None:
        return None

    jury_type = _Credulous


class _AcksEarly(Ballots):
    def _may_accept(self, value: Value) -> bool:
        return True


class _ForgetsToPersist(Ballots):
    def _backed(self, persist: Action) -> list[Action]:
        return []


class _ForgetsPromise(Ballots):
    """Promises in memory only."""

    def on_prepare(self, sender, message, now):  # type: ignore[no-untyped-def]
        actions, reason = super().on_prepare(sender, message, now)
        return [action for action in actions if not isinstance(action, Persist)], reason


class _SignsEpochsUnbacked(Epochs):
    def _backed(self, persist: Action) -> list[Action]:
        return []


class _NeverCallsEpochs(Epochs):
    def advance(self, now: float, *, first_offer_at: float | None) -> list[Action]:
        return super().advance(now, first_offer_at=first_offer_at) if self._seat.place.is_genesis else []


class _KeepsMovement(RoundMachine):
    """Keeps its movement over every branch switch, also where it is in the new branch already."""

    def handle(self, event: Input, now: float) -> list[Action]:
        return [
            replace(action, keep_movement=True) if isinstance(action, FetchState) and action.donors else action
            for action in super().handle(event, now)
        ]


class _AppliesWithoutBlobs(RoundMachine):
    def _want(self, certificate: Certificate) -> list[Action]:
        for entry in certificate.value.entries:
            self._holdings.held(entry.blob, certificate.value.round)
        return []


def _with(name: str, *, ballots_: type[Ballots] = Ballots, epochs_: type[Epochs] = Epochs) -> type[RoundMachine]:
    return type(name, (RoundMachine,), {"ballots_type": ballots_, "epochs_type": epochs_})


FAULTS: dict[str, type[RoundMachine]] = {
    "a leader that ignores accepted values": _with("IgnoresAccepted", ballots_=_IgnoresAccepted),
    "ACK before holding the blobs": _with("AcksEarly", ballots_=_AcksEarly),
    "ACK without Persist": _with("ForgetsToPersist", ballots_=_ForgetsToPersist),
    "PROMISE without Persist": _with("ForgetsPromise", ballots_=_ForgetsPromise),
    "EPOCH signature without Persist": _with("SignsEpochsUnbacked", epochs_=_SignsEpochsUnbacked),
    "no epoch after genesis": _with("NeverCallsEpochs", epochs_=_NeverCallsEpochs),
    "movement kept over every switch": _KeepsMovement,
    "applied without its blobs": _AppliesWithoutBlobs,
}


def _any_peer(peers: Collection[PeerId], roster: Sequence[PeerId]) -> bool:
    return any(peer in peers for peer in roster)


def _any_half(peers: Collection[PeerId], roster: Sequence[PeerId]) -> bool:
    return bool(roster) and 2 * sum(1 for peer in roster if peer in peers) >= len(roster)


def _is_member(seat: Seat) -> bool:
    return seat.is_member


def _any_branch(chain: Chain, left: Suffix | None, right: Suffix | None) -> bool:
    return True


@contextmanager
def votes_after_epochs() -> Iterator[None]:
    with patch.object(Seat, "may_vote", property(_is_member)):
        yield


@contextmanager
def adopts_half_branches() -> Iterator[None]:
    with patch.object(anchorage, "is_better", _any_branch):
        yield


PATCHES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "votes in an epoch after it signed a newer one": votes_after_epochs,
    "half of a better branch is adopted": adopts_half_branches,
}
QUORUM_FAULTS = {"a quorum of one": _any_peer, "half without tie-break": _any_half}


@contextmanager
def wrong_quorum(rule) -> Iterator[None]:  # type: ignore[no-untyped-def]
    """The protocol under test counts quorums by this rule; the invariants keep the right one."""
    with (
        patch.object(chain, "is_quorum", rule),
        patch.object(ballots, "is_quorum", rule),
        patch.object(epochs, "is_quorum", rule),
    ):
        yield
