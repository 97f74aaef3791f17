"""How the other members have behaved, as far as we saw it ourselves: who is waited for, and whose ballots are heeded. Pure.

Nothing here decides what is agreed on, nor who is in a roster (but for proven equivocators, `is_proven`): it only says for
whom we wait. A contribution that is here in time is taken, whoever sent it; a value that a quorum accepts is a certificate,
whoever led. So an honest peer that earns strikes on a bad link loses nothing but the patience of the others, and earns it back.

    missed     its contribution was offered and not to be had (or was late: a quarter of it); from the second time on
               neither its offer nor its contribution nor its turn to lead is waited for. Every round it delivers takes some off, also
               where it came too late only as nobody waited: who is slow once would else be left out for ever. One
               that is still on its way counts in full for as long as it is: who lets fetches hang holds two rounds up. That
               it trained and offered nothing, though offers were waited for to the end, is half of one missed.
    led        its turn came and it proposed nothing that we could accept, or left out what was here
    outbid     it asked for more ballots than its budget, or got promises and proposed nothing
    planned    it proposed a plan that the certificates do not lead to
    claimed    it claimed work that nobody can have done
    averaged   what it said a slice came to was not what others came to: it averages none meanwhile

The last five put a peer off for PUT_OFF_ROUNDS rounds, twice as long each time: its turn is not waited for, and ballots it
asks for are heeded only when it is their time by our own clock. A ballot of its that is certified takes one back.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from dilocox_peer.events import EquivocationProved, Event, MemberDoubted
from dilocox_peer.peer.rounds.chain import Verifier
from dilocox_peer.peer.rounds.justified import why_guilty
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.rounds import Contradiction

Fault = Literal["led", "outbid", "planned", "claimed", "averaged"]

MAX_REMEMBERED = 512  # peers; those in the roster are looked at in every round and so stay
MAX_PROVEN = 512
MAX_OWED = 4  # contributions of one peer that were not here when their round was certified
PUT_OFF_ROUNDS = 32
MAX_DOUBLINGS = 4
MISSED, SILENT, LATE, DELIVERED, DOUBT, MOST = (
    8,
    4,
    2,
    1,
    16,
    48,
)  # points: two contributions missed are a doubt, eight delivered undo one
NO_DELIVERY, NO_OFFER, NO_RESULT = (
    "its contributions are offered and do not arrive",
    "it trains and offers no contribution in time",
    "what it says that slices came to does not arrive",
)
BALLOTS_A_HEAD = 2  # of a member's that are heeded at once; one more each time a ballot's time has passed
WORK_SPREAD = 256.0
"""How many times as fast as the fastest of the others a peer may claim to be: a GPU among CPUs is, for a model that suits it.
Below that a claim gains nothing: mean and clock count it as at most four times the median of the others."""
REFUSED_SPREAD = 4.0  # beyond what a leader leaves out: members that measured otherwise do not refuse it for a hair


@dataclass(slots=True)
class _Record:
    """missed: points, not times. owed: until when each may come, and until when it would have been waited for. put_off: by fault, how
    often, and until which of our rounds."""

    missed: int = 0
    told_missing: bool = False
    owed: "OrderedDict[Digest, tuple[float, float]]" = field(default_factory=OrderedDict)
    faults: dict[Fault, int] = field(default_factory=dict)
    put_off: dict[Fault, int] = field(default_factory=dict)
    pace: float = 0.0  # micro-batches a second, by its newest settled claim
    settled_at: float | None = None


class Conduct:
    """The conduct of all peers but ourselves. `events` are to be told, and taken out, by whoever owns this."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._rounds = 0
        self._records: OrderedDict[PeerId, _Record] = OrderedDict()
        self._proven: OrderedDict[PeerId, Contradiction] = OrderedDict()
        self._proven_strangers: OrderedDict[PeerId, Contradiction] = OrderedDict()  # whose keys cost nothing
        self._own_pace = 0.0
        self.events: list[Event] = []

    def _of(self, peer: PeerId) -> _Record:
        record = self._records.get(peer)
        if record is None:
            record = self._records[peer] = _Record()
            if len(self._records) > MAX_REMEMBERED:
                self._records.popitem(last=False)
        self._records.move_to_end(peer)
        return record

    # ---- what is asked ----

    @property
    def num_remembered(self) -> int:
        """Peers of whom something is kept; at most MAX_REMEMBERED."""
        return len(self._records)

    def is_proven(self, peer: PeerId) -> bool:
        """Whether it signed what no honest peer signs: it is in no roster that we write."""
        return peer in self._proven or peer in self._proven_strangers

    def proof_against(self, peer: PeerId) -> Contradiction | None:
        return self._proven.get(peer) or self._proven_strangers.get(peer)

    def waited_for(self, roster: Collection[PeerId]) -> set[PeerId]:
        """Those of the roster whose contributions are worth waiting for. Should most of the others seem to fail, it is our
        own link that does: then all are."""
        return self._unless_most(roster, {peer for peer in roster if self.is_doubted(peer)})

    def is_doubted(self, peer: PeerId) -> bool:
        """Whether its contributions are late or missing as a rule."""
        record = self._records.get(peer)
        if record is None:
            return peer in self._proven
        is_missing = record.missed + MISSED * len(record.owed) >= DOUBT
        return is_missing or self._is_put_off(record, "claimed") or peer in self._proven

    def owes(self, peer: PeerId) -> bool:
        """Whether an earlier contribution of its is still not here: the next one must not take the room of others'."""
        record = self._records.get(peer)
        return record is not None and bool(record.owed)

    def best_first(self, peers: Iterable[PeerId]) -> list[PeerId]:
        """Sources in this order, those that stood out badly in any way later, and those last that do not deliver: they may keep us waiting."""
        return sorted(peers, key=lambda peer: (not self.averages(peer), not self.leads(peer)))

    def leads(self, peer: PeerId) -> bool:
        """Whether its turn is waited for."""
        record = self._records.get(peer)
        put_off = record is not None and any(self._is_put_off(record, fault) for fault in record.put_off)
        return not put_off and peer not in self._proven

    def trusted(self, voters: Collection[PeerId]) -> set[PeerId]:
        """Those voters whose turns to lead are waited for, and whose ballots are heeded. Should we doubt most of the others, it may be us: then all are,
        as voters that doubt each other take the floor from one another for good."""
        return self._unless_most(voters, {peer for peer in voters if not self.leads(peer)})

    def _unless_most(self, peers: Collection[PeerId], doubted: set[PeerId]) -> set[PeerId]:
        """These without the doubted; with them, but for the proven ones, where they are most of the others."""
        doubted = doubted - {self._me}
        if 2 * len(doubted) > len(peers) - (self._me in peers):
            doubted = {peer for peer in doubted if peer in self._proven}
        return set(peers) - doubted

    def averages(self, peer: PeerId) -> bool:
        """Whether slices are left to it."""
        record = self._records.get(peer)
        return not self.is_doubted(peer) and not (record is not None and self._is_put_off(record, "averaged"))

    def _is_put_off(self, record: _Record, fault: Fault) -> bool:
        return bool(record.put_off) and self._rounds < record.put_off.get(fault, -1)

    # ---- what was seen ----

    def strike(self, peer: PeerId, fault: Fault, reason: str) -> None:
        """It did what stops rounds. While it is put off for it already, nothing is added."""
        if peer == self._me:
            return
        record = self._of(peer)
        if self._is_put_off(record, fault):
            return
        times = record.faults[fault] = record.faults.get(fault, 0) + 1
        rounds = PUT_OFF_ROUNDS << min(times - 1, MAX_DOUBLINGS)
        record.put_off[fault] = self._rounds + rounds
        self.events.append(MemberDoubted(peer, reason, rounds))

    def led(self, peer: PeerId) -> None:
        """A ballot of its was certified."""
        if (record := self._records.get(peer)) is None:
            return
        for fault in ("led", "outbid"):
            if times := record.faults.get(fault, 0):
                record.faults[fault] = times - 1
                record.put_off.pop(fault, None)

    def delivered(self, peer: PeerId) -> None:
        """Its contribution was here when the round was certified."""
        record = self._of(peer)
        record.missed = max(0, record.missed - DELIVERED)
        record.told_missing = record.told_missing and record.missed >= DOUBT

    def undelivered(self, peer: PeerId, blob: Digest, *, due_at: float, waited_until: float, has_failed: bool) -> None:
        """The round is certified and its contribution is not here: it may still come, late, until due_at. waited_until: before that
        it is not late, whoever did not wait."""
        if has_failed:
            self._missed(peer, MISSED, NO_DELIVERY)
            return
        owed = self._of(peer).owed
        owed[blob] = (due_at, waited_until)
        while len(owed) > MAX_OWED:
            owed.popitem(last=False)
            self._missed(peer, MISSED, NO_DELIVERY)

    def undelivered_to_others(self, peer: PeerId, *, in_time: bool) -> None:
        """The round is certified, and its contribution, in slices, is not with all whose slices they are, though we have ours of it.
        in_time: it was not waited for to the end, so that nothing can be said against it."""
        if not in_time:
            self._missed(peer, MISSED, NO_DELIVERY)
        elif self._of(peer).missed >= DOUBT:
            self.delivered(peer)

    def silent(self, peer: PeerId) -> None:
        """The round is certified, its offer was waited for to the end, and none came though it trains."""
        self._missed(peer, SILENT, NO_OFFER)

    def withheld(self, peer: PeerId) -> None:
        """What it said that a slice came to was asked for in vain."""
        self._missed(peer, SILENT, NO_RESULT)

    def came(self, blob: Digest, now: float) -> None:
        """A contribution is here."""
        for peer, record in list(self._records.items()):
            if (owed := record.owed.pop(blob, None)) is None:
                continue
            if now <= owed[1]:  # in time, had it been waited for
                if record.missed >= DOUBT:
                    self.delivered(peer)
            else:
                self._missed(peer, LATE, NO_DELIVERY)

    def failed(self, blob: Digest, alive: Collection[PeerId]) -> None:
        """A contribution is not to be had. A peer that has gone meanwhile is not to blame."""
        for peer, record in list(self._records.items()):
            if record.owed.pop(blob, None) is not None and peer in alive:
                self._missed(peer, MISSED, NO_DELIVERY)

    def round_certified(self, roster: Iterable[PeerId], alive: Collection[PeerId], now: float) -> None:
        """One more round is behind us."""
        self._rounds += 1
        for peer in roster:
            record = self._records.get(peer)
            if record is None:
                continue
            self._records.move_to_end(peer)
            for blob in [blob for blob, (due_at, _) in record.owed.items() if due_at <= now]:
                del record.owed[blob]
                if peer in alive:
                    self._missed(peer, MISSED, NO_DELIVERY)

    def _missed(self, peer: PeerId, points: int, reason: str) -> None:
        record = self._of(peer)
        record.missed = min(record.missed + points, MOST)
        if record.missed >= DOUBT and not record.told_missing:
            record.told_missing = True
            self.events.append(MemberDoubted(peer, reason, 0))

    # ---- work that is claimed ----

    def worked(self, peer: PeerId, micro_batches: int, since: float, now: float) -> None:
        """A claim was certified. since: when the head before it began, for a peer that nothing is known of yet."""
        if peer == self._me:
            # A round in which we were suspended, paused or without a link says nothing of what others can do.
            self._own_pace = max(micro_batches / max(now - since, 0.1), self._own_pace / 2)
            return
        record = self._of(peer)
        began = since if record.settled_at is None else record.settled_at
        record.pace, record.settled_at = micro_batches / max(now - began, 0.1), now

    def most_work(self, peer: PeerId, roster: Iterable[PeerId], since: float, now: float) -> float | None:
        """Micro-batches that peer can have done by now: WORK_SPREAD times the pace of the fastest of the others, without the
        fastest quarter of them, who may be as hostile. None while no pace is known."""
        others = [self._pace_of(each) for each in roster if each != peer]
        paces = sorted(pace for pace in others if pace > 0)
        if not paces:
            return None
        record = self._records.get(peer)
        began = since if record is None or record.settled_at is None else min(record.settled_at, since)
        return WORK_SPREAD * paces[-1 - len(paces) // 4] * max(now - began, 1.0)

    def _pace_of(self, peer: PeerId) -> float:
        if peer == self._me:
            return self._own_pace
        return record.pace if (record := self._records.get(peer)) is not None else 0.0

    # ---- proofs ----

    def accuse(self, proof: Contradiction, stage: int, verify: Verifier, *, is_new: bool = False) -> bool:
        """Takes a proof in that says something new; False for what is known, or proves nothing. is_new: it is against somebody who was in
        no roster here; that is nobody's news, and takes no member's place."""
        if self.is_proven(proof.peer) or proof.peer == self._me:
            return False
        reason = why_guilty(proof, stage, verify)
        if reason is None:
            return False
        proven = self._proven_strangers if is_new else self._proven
        proven[proof.peer] = proof
        if len(proven) > MAX_PROVEN:
            proven.popitem(last=False)
        if not is_new:
            self.events.append(EquivocationProved(proof.peer, reason))
        return True
