"""Messages between two members that have no path to one another, by way of a third. Pure.

Routers, and a run without relays, leave pairs of a stage that cannot be connected. Rounds need that messages reach everybody: a member that is
not heard is taken for absent, and two halves that do not hear each other certify apart. Messages are small, so members pass them on;
contributions are not, and are fetched of any holder (arrivals.py).

A member whom we neither reach (PeerUnreached) nor hear is cut off until it is heard directly. What we send to it goes a second time, in an envelope
that we sign, to members that we do hear: to the one that last brought something of its, and but for heartbeats to another one in turn. A member that gets
an envelope for another hands it on if it hears both; no envelope goes through two, so two members without a neighbour in common stay cut off.

Hostile: a member that passes on can drop and delay; it cannot change, make up or repeat, but what it kept back from before this process
began. Nothing is passed on for others than members, and each has a budget of bytes at each, and of what each other brings of it.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

from dilocox_peer.contract import Note
from dilocox_peer.errors import ProtocolError
from dilocox_peer.events_of_reach import HeardThrough
from dilocox_peer.peer.rounds.contract import Action, Send
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.seat import Owner
from dilocox_peer.token_bucket import TokenBucket
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.rounds import (
    MAX_PASSED_BYTES,
    Heartbeat,
    Message,
    Passed,
    decode_message,
    encode_message,
    passed_statement,
)

K = TypeVar("K")
V = TypeVar("V")

BYTES_A_S, BURST_BYTES = (
    65_536.0,
    524_288.0,
)  # that are handed on for one member, and that are opened of one by way of another
ENVELOPE_BYTES = 1024  # what one counts as beside its message: a signature is checked
MAX_BUDGETS, MAX_REMEMBERED = (
    4096,
    128,
)  # pairs of who brought something and who wrote it; members whose numbers are known
WINDOW = 256  # numbers of one member's: it comes by several ways, not in order, and each counts once


class Passing:
    """The envelopes of one peer: it sends, opens and hands them on."""

    def __init__(
        self,
        owner: Owner,
        genesis: Digest,
        members: Members,
        *,
        hear: Callable[[PeerId, Message], list[Action]],
        refuse: Callable[[PeerId, str], list[Action]],
    ) -> None:
        """hear: a message, of whoever wrote it. refuse: tells why one of a peer's is not taken."""
        self._me = owner.peer
        self._owner = owner
        self._genesis = genesis
        self._members = members
        self._hear = hear
        self._refuse = refuse
        self._numbers = itertools.count(owner.incarnation)  # which grows from process to process
        self._turn = 0
        self._handed: OrderedDict[PeerId, TokenBucket] = OrderedDict()  # for whom
        self._opened: OrderedDict[tuple[PeerId, PeerId], TokenBucket] = OrderedDict()  # by whom, of whom
        self._came: OrderedDict[PeerId, set[int]] = OrderedDict()
        self.was_beat = False  # what was received last: nothing follows from it at once

    # ---- what we send ----

    def through(self, actions: list[Action], roster: Collection[PeerId], now: float) -> list[Action]:
        """The same, and what goes to members that are cut off a second time, by way of others."""
        cut = self._members.cut_off
        if not cut or not any(isinstance(each, Send) and each.to in cut for each in actions):
            return actions
        linked = [peer for peer in roster if peer != self._me and self._members.is_linked(peer, now)]
        return [*actions, *(each for action in actions for each in self._by_others(action, roster, linked))]

    def _by_others(self, action: Action, roster: Collection[PeerId], linked: list[PeerId]) -> Iterable[Send]:
        if not isinstance(action, Send) or action.to not in self._members.cut_off or action.to not in roster:
            return
        message = action.message
        if isinstance(message, Passed) or not linked:
            return
        raw = encode_message(message)
        if len(raw) > MAX_PASSED_BYTES:
            return
        number, self._turn = next(self._numbers), self._turn + 1
        signature = self._owner.sign(passed_statement(self._genesis, self._me, action.to, number, raw))
        envelope = Passed(message.stage, message.head, message.view, self._me, action.to, number, raw, signature)
        vias = self._members.around(action.to, linked, self._turn)
        for via in vias[:1] if isinstance(message, Heartbeat) and action.to in self._members.ways else vias:
            yield Send(via, envelope)

    # ---- what comes in ----

    def receive(self, sender: PeerId, message: Message, roster: Collection[PeerId], now: float) -> list[Action]:
        """What follows from a message that sender brought."""
        self.was_beat = isinstance(message, Heartbeat)
        if isinstance(message, Passed):
            return self._open(sender, message, roster, now)
        actions = self._hear(sender, message)
        self._members.linked(sender, now)
        return actions

    def _open(self, sender: PeerId, envelope: Passed, roster: Collection[PeerId], now: float) -> list[Action]:
        origin, to = envelope.origin, envelope.to
        if origin not in roster or to not in roster or sender not in roster or origin == to:
            return []  # rosters change: one of them may know a newer one than we
        if sender != origin and to != self._me:
            return self._refuse(sender, f"passes on for {origin} what is not for this peer")
        if to != self._me:
            self.was_beat = True
            return self._hand_on(envelope, now)
        if origin == self._me or not self._is_within(self._opened, (sender, origin), envelope, now):
            return []
        if not self._is_signed(envelope):
            return self._refuse(sender, f"passes on what {origin} has not signed")
        if not self._is_new(origin, envelope.number):
            return []
        actions: list[Action] = []
        if sender != origin and not self._members.is_linked(origin, now):
            self._members.cut(origin, now)  # or our answers would go nowhere until one of them has failed
            if self._members.comes_by(origin, sender):
                actions.append(Note(HeardThrough(origin, sender)))
        try:
            message = decode_message(envelope.raw, origin)
        except ProtocolError as error:
            return self._refuse(origin, error.reason)
        if isinstance(message, Passed):
            return self._refuse(origin, "an envelope within an envelope")
        self.was_beat = isinstance(message, Heartbeat)
        actions += self._hear(origin, message)
        self._members.passed(origin, now)
        return actions

    def _hand_on(self, envelope: Passed, now: float) -> list[Action]:
        origin = envelope.origin
        if not self._members.is_linked(envelope.to, now) or not self._is_within(self._handed, origin, envelope, now):
            return []
        if not self._is_signed(envelope):
            return self._refuse(origin, "wants passed on what it has not signed")
        return [Send(envelope.to, envelope)]

    def _is_within(self, budgets: OrderedDict[K, TokenBucket], who: K, envelope: Passed, now: float) -> bool:
        """By whom it came is part of it where it is opened: else anybody could use up what another has, with envelopes that it never signed."""
        budget = budgets.get(who)
        if budget is None:
            budget = self._remember(budgets, who, TokenBucket(BYTES_A_S, BURST_BYTES, now), MAX_BUDGETS)
        return budget.try_take(ENVELOPE_BYTES + len(envelope.raw), now)

    def _is_signed(self, envelope: Passed) -> bool:
        statement = passed_statement(self._genesis, envelope.origin, envelope.to, envelope.number, envelope.raw)
        return self._owner.verify(envelope.origin, statement, envelope.signature)

    def _is_new(self, origin: PeerId, number: int) -> bool:
        came = self._came.get(origin)
        if came is None:
            came = self._remember(self._came, origin, set[int](), MAX_REMEMBERED)
        self._came.move_to_end(origin)
        if number in came or number <= max(came, default=0) - WINDOW:
            return False
        came.add(number)
        came -= {each for each in came if each <= number - WINDOW}
        return True

    @staticmethod
    def _remember(table: OrderedDict[K, V], key: K, value: V, most: int) -> V:
        table[key] = value
        table.move_to_end(key)
        while len(table) > most:
            table.popitem(last=False)
        return value
