"""What a hostile member does: the very machine of a peer, turned against the others. Used by the simulator and by real processes.

Each class is honest until `has_turned`; then it may send anything that it can sign.
"""

from collections.abc import Collection, Mapping
from typing import Any

from dilocox_peer.contract import Note
from dilocox_peer.events import Remark
from dilocox_peer.peer.planning.plan import PlanBounds
from dilocox_peer.peer.planning.planner import FixedPlanner, Planner
from dilocox_peer.peer.rounds.ballots import Ballots
from dilocox_peer.peer.rounds.chain import is_quorum
from dilocox_peer.peer.rounds.contract import Action, Closed, Input, Received, Send
from dilocox_peer.peer.rounds.drafting import Drafts
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.sitting import Sitting
from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Entry, Plan, Value, offer_statement
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.rounds import Accepted, Ack, Cert, Heartbeat, Offer, Prepare, Promise, Propose

CLAIM = 2**31
OUTBID_EVERY_S = 0.2
TURNED = "signs a second value from here on"  # it may be rounds before it leads


class Hostile(RoundMachine):
    """Honest until it turns."""

    has_turned = False

    def handle(self, event: Input, now: float, *, more: bool = False) -> list[Action]:
        if not self.has_turned:
            return super().handle(event, now, more=more)
        return self._abuse(event, super().handle(self._twisted(event), now, more=more), now)

    def _twisted(self, event: Input) -> Input:
        return event

    def _abuse(self, event: Input, actions: list[Action], now: float) -> list[Action]:
        return actions


class OffersNothing(Hostile):
    """Offers at every new head, at once, what is nowhere to be had; as a leader too."""

    _offered_at: Digest | None = None

    def _fake(self, entry: Entry) -> Entry:
        return replaced(entry, blob=sha256(b"nowhere", entry.peer.encode(), self.head))

    def _twisted(self, event: Input) -> Input:
        return Closed(event.base, self._fake(event.entry)) if isinstance(event, Closed) else event

    def _abuse(self, event: Input, actions: list[Action], now: float) -> list[Action]:
        if self._offered_at != self.head and self.sitting.seat.is_member:
            self._offered_at = self.head
            mine = self._fake(Entry(self._owner.peer, self._owner.incarnation, self.head, 10, 8, self.state_digest))
            seat = self.sitting.seat
            signature = self._owner.sign(offer_statement(seat.place.stage, self.head, mine))
            actions += [Send(peer, Offer(*seat.at(), mine, signature)) for peer in seat.others]
        return actions


class Hangs(OffersNothing):
    """The same, and whoever asks for it hears nothing for a minute."""


class Silent(Hostile):
    """Trains, by what it says, and never offers anything. A disk that hangs does the same to an honest peer."""

    def handle(self, event: Input, now: float, *, more: bool = False) -> list[Action]:
        return [] if self.has_turned and isinstance(event, Closed) else super().handle(event, now, more=more)


class Claims(Hostile):
    """Claims more work than there is, with its contributions and with its heartbeats."""

    def _twisted(self, event: Input) -> Input:
        return Closed(event.base, replaced(event.entry, micro_batches=CLAIM)) if isinstance(event, Closed) else event

    def _abuse(self, event: Input, actions: list[Action], now: float) -> list[Action]:
        return [
            Send(each.to, replaced(each.message, micro_batches=CLAIM))
            if isinstance(each, Send) and isinstance(each.message, Heartbeat)
            else each
            for each in actions
        ]


class Outbids(Hostile):
    """Asks for ever higher ballots, and proposes in none."""

    _outbid_at = 0.0
    _ballot = 0
    _ballot_head: Digest | None = None

    def deadline(self) -> float | None:
        due = super().deadline()
        return min(due, self._outbid_at) if due is not None and self.has_turned else due

    def _abuse(self, event: Input, actions: list[Action], now: float) -> list[Action]:
        actions = [each for each in actions if not (isinstance(each, Send) and isinstance(each.message, Propose))]
        if now < self._outbid_at:
            return actions
        self._outbid_at = now + OUTBID_EVERY_S
        if not self.sitting.seat.is_voter:
            return actions
        if self._ballot_head != self.head:
            self._ballot_head, self._ballot = self.head, 0
        ballot = max(self._ballot, self.sitting.seat.votes.promised) + 1
        while self.sitting.seat.leader(ballot) != self._owner.peer:
            ballot += 1
        self._ballot = ballot
        return actions + [Send(peer, Prepare(*self.sitting.seat.at(), ballot)) for peer in self.sitting.seat.others]


class LeadsNothing(Hostile):
    """Asks for ballots in its turn, and never proposes."""

    def _abuse(self, event: Input, actions: list[Action], now: float) -> list[Action]:
        return [each for each in actions if not (isinstance(each, Send) and isinstance(each.message, Propose))]


class Equivocates(Hostile):
    """Proposes one value to one half and another to the other, and certifies whatever it can."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._others: dict[tuple[Digest, int], tuple[Value, dict[PeerId, bytes]]] = {}

    def _abuse(self, event: Input, actions: list[Action], now: float) -> list[Action]:
        told: list[Action] = []
        for each in actions:
            if isinstance(each, Send) and isinstance(each.message, Propose) and self._is_other_half(each.to):
                if not self._others:
                    told.append(Note(Remark(TURNED)))
                told.append(Send(each.to, self._other(each.message)))
            else:
                told.append(each)
        if isinstance(event, Received) and isinstance(event.message, Ack):
            told += self._certify_other(event.sender, event.message)
        return told

    def _is_other_half(self, peer: PeerId) -> bool:
        return sorted(self.sitting.seat.others).index(peer) % 2 == 1 if peer in self.sitting.seat.others else False

    def _other(self, message: Propose) -> Propose:
        seat, key = self.sitting.seat, (message.head, message.ballot)
        if key not in self._others:
            entries = message.value.entries[1:] if len(message.value.entries) > 1 else ()
            value = seat.place.round_value(entries, message.value.roster, message.value.plan)
            signature = seat.signature(value, view=seat.place.view, ballot=message.ballot)
            self._others[key] = (value, {seat.me: signature})
        value, signatures = self._others[key]
        authors = tuple(
            signature
            for entry, signature in zip(message.value.entries, message.authors, strict=True)
            if entry in value.entries
        )
        return replaced(message, value=value, signature=signatures[seat.me], authors=authors)

    def _certify_other(self, sender: PeerId, ack: Ack) -> list[Action]:
        found = self._others.get((ack.head, ack.ballot))
        if found is None or found[0].digest() != ack.value or ack.head != self.head:
            return []
        value, signatures = found
        signatures[sender] = ack.signature
        if not is_quorum(signatures, self.sitting.seat.place.voters):
            return []
        certificate = self.sitting.seat.certificate(value, signatures, view=self.view, ballot=ack.ballot)
        half = [peer for peer in self.sitting.seat.others if self._is_other_half(peer)]
        return [Send(peer, Cert(*self.sitting.seat.at(), certificate)) for peer in half]


class _Ignores(Ballots):
    def _forced_value(self, promises: Mapping[PeerId, Accepted | None]) -> Value | None:
        return None


class _Lies(Ballots):
    def on_prepare(self, sender, message, now):
        actions, reason = super().on_prepare(sender, message, now)
        seat = self._seat
        for index, each in enumerate(actions):
            if isinstance(each, Send) and isinstance(each.message, Promise):
                signature = seat.promise(message.ballot, None).signature
                actions[index] = Send(each.to, replaced(each.message, accepted=None, signature=signature))
        return actions, reason


class _Empty(Drafts):
    def entries(self, excluded: Collection[Digest], now: float) -> list[Entry]:
        return []


class _Omits(Ballots):
    drafts_type = _Empty


class IgnoresAccepted(Hostile):
    """Leads without heeding what others had accepted."""

    sitting_type = type("Sitting", (Sitting,), {"ballots_type": _Ignores})


class PromisesAndLies(Hostile):
    """Promises, and says that it had accepted nothing."""

    sitting_type = type("Sitting", (Sitting,), {"ballots_type": _Lies})


class Omits(Hostile):
    """Leads, and leaves out everybody's contributions."""

    sitting_type = type("Sitting", (Sitting,), {"ballots_type": _Omits})


class PlansAstray(Hostile):
    """Leads, and plans what no certificate leads to: float32, eight steps, sixty times the bytes."""

    codec, inner_steps = "none", 8

    def __init__(self, **given: Any) -> None:
        given["planner"] = _Astray(self, given["plans"], given.get("planner") or FixedPlanner(given["plans"]))
        super().__init__(**given)


class _Astray:
    """A planner that is right until its machine has turned."""

    is_exact = False

    def __init__(self, machine: PlansAstray, bounds: PlanBounds, planner: Planner) -> None:
        self._machine, self._bounds, self._planner = machine, bounds, planner

    @property
    def reason(self) -> str:
        return self._planner.reason

    def observe(self, certificate: Certificate, bounds: PlanBounds | None = None) -> None:
        self._planner.observe(certificate, bounds)

    def next(self, before: Plan) -> Plan:
        if not self._machine.has_turned:
            return self._planner.next(before)
        machine = self._machine
        return self._bounds.after(before, codec=machine.codec, rank=before.rank, inner_steps=machine.inner_steps)


MODES: dict[str, type[Hostile]] = {
    "offers nothing": OffersNothing,
    "hangs": Hangs,
    "silent": Silent,
    "plans astray": PlansAstray,
    "claims": Claims,
    "outbids": Outbids,
    "leads nothing": LeadsNothing,
    "equivocates": Equivocates,
    "ignores accepted": IgnoresAccepted,
    "promises and lies": PromisesAndLies,
    "omits": Omits,
}
