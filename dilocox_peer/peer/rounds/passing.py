"""Messages between two members that have no path to one another, by way of a third. Pure.

Routers, and a run without relays, leave pairs of a stage that cannot be connected. Rounds need that messages reach everybody: a member that is
not heard is taken for absent, and two halves that do not hear each other certify apart. Messages are small, so members pass them on;
contributions are not, and are fetched of any holder (arrivals.py).

A member whom we cannot send to (PeerUnreached) is cut off until it is heard directly. What we send to it goes a second time, in an envelope
that we sign, to members that we do hear: to the one that last brought something of its, else to VIAS in turn. A member that gets
an envelope for another hands it on if it hears both; no envelope goes through two, so two members without a neighbour in common stay cut off.

Hostile: a member that passes on can drop and delay; it cannot change, make up or repeat, but what it kept back from before this process
began. Nothing is passed on for others than members, and each has a budget of bytes at each.
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
from dilocox_peer.types import PeerId
from dilocox_peer.wire.rounds import (
    MAX_PASSED_BYTES,
    Message,
    Passed,
    decode_message,
    encode_message,
    passed_statement,
)

V = TypeVar("V")

VIAS = 2  # members that are tried at once where it is not known who hears the other
BYTES_A_S, BURST_BYTES = 32_768.0, 262_144.0  # that are handed on for one member
MAX_REMEMBERED = 128  # members that something was passed on for, or of
WINDOW = 256  # numbers of one member's: it comes by several ways, not in order, and each counts once


class Passing:
    """Of one peer."""

    def __init__(
        self,
        owner: Owner,
        members: Members,
        *,
        hear: Callable[[PeerId, Message], list[Action]],
        refuse: Callable[[PeerId, str], list[Action]],
    ) -> None:
        """hear: a message, of whoever wrote it. refuse: tells why one of a peer's is not taken."""
        self._me = owner.peer
        self._owner = owner
        self._members = members
        self._hear = hear
        self._refuse = refuse
        self._numbers = itertools.count(owner.incarnation)  # which grows from process to process
        self._turn = 0
        self._ways: OrderedDict[PeerId, PeerId] = OrderedDict()  # by whom something of a member came last
        self._budgets: OrderedDict[PeerId, TokenBucket] = OrderedDict()
        self._came: OrderedDict[PeerId, set[int]] = OrderedDict()

    # ---- what we send ----

    def through(self, actions: list[Action], roster: Collection[PeerId], now: float) -> list[Action]:
        """The same, and what goes to members that are cut off a second time, by way of others."""
        if not self._members.cut_off:
            self._ways.clear()
            return actions
        linked = [peer for peer in roster if peer != self._me and self._members.is_linked(peer, now)]
        return [each for action in actions for each in (action, *self._by_others(action, roster, linked))]

    def _by_others(self, action: Action, roster: Collection[PeerId], linked: list[PeerId]) -> Iterable[Send]:
        if not isinstance(action, Send) or not linked or action.to not in roster:
            return
        message = action.message
        if action.to not in self._members.cut_off or isinstance(message, Passed):
            return
        raw = encode_message(message)
        if len(raw) > MAX_PASSED_BYTES:
            return
        number = next(self._numbers)
        signature = self._owner.sign(passed_statement(self._me, action.to, number, raw))
        envelope = Passed(message.stage, message.head, message.view, self._me, action.to, number, raw, signature)
        for via in self._vias(action.to, linked):
            yield Send(via, envelope)

    def _vias(self, to: PeerId, linked: list[PeerId]) -> list[PeerId]:
        if (way := self._ways.get(to)) in linked and way is not None:
            return [way]
        self._turn += 1
        return [linked[(self._turn + index) % len(linked)] for index in range(min(VIAS, len(linked)))]

    # ---- what comes in ----

    def receive(self, sender: PeerId, message: Message, roster: Collection[PeerId], now: float) -> list[Action]:
        """What follows from a message that sender brought."""
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
            return self._hand_on(envelope, now)
        if origin == self._me:
            return []
        if not self._is_signed(envelope):
            return self._refuse(sender, f"passes on what {origin} has not signed")
        if not self._is_new(origin, envelope.number):
            return []
        actions: list[Action] = []
        if sender != origin and not self._members.is_linked(origin, now):
            self._members.cut(origin)  # or our answers would go nowhere until one of them has failed
            actions += self._comes_by(origin, sender)
        try:
            message = decode_message(envelope.raw, origin)
        except ProtocolError as error:
            return self._refuse(origin, error.reason)
        if isinstance(message, Passed):
            return self._refuse(origin, "an envelope within an envelope")
        actions += self._hear(origin, message)
        self._members.passed(origin, now)
        return actions

    def _comes_by(self, origin: PeerId, sender: PeerId) -> tuple[Note, ...]:
        is_news = origin not in self._ways
        self._remember(self._ways, origin, sender)
        return (Note(HeardThrough(origin, sender)),) if is_news else ()

    def _hand_on(self, envelope: Passed, now: float) -> list[Action]:
        origin = envelope.origin
        if not self._members.is_linked(envelope.to, now):
            return []
        budget = self._budgets.get(origin)
        if budget is None:
            budget = self._remember(self._budgets, origin, TokenBucket(BYTES_A_S, BURST_BYTES, now))
        if not budget.try_take(len(envelope.raw), now):
            return []
        if not self._is_signed(envelope):
            return self._refuse(origin, "wants passed on what it has not signed")
        return [Send(envelope.to, envelope)]

    def _is_signed(self, envelope: Passed) -> bool:
        statement = passed_statement(envelope.origin, envelope.to, envelope.number, envelope.raw)
        return self._owner.verify(envelope.origin, statement, envelope.signature)

    def _is_new(self, origin: PeerId, number: int) -> bool:
        came = self._came.get(origin)
        if came is None:
            came = self._remember(self._came, origin, set[int]())
        self._came.move_to_end(origin)
        if number in came or number <= max(came, default=0) - WINDOW:
            return False
        came.add(number)
        came -= {each for each in came if each <= number - WINDOW}
        return True

    @staticmethod
    def _remember(table: OrderedDict[PeerId, V], peer: PeerId, value: V) -> V:
        table[peer] = value
        table.move_to_end(peer)
        while len(table) > MAX_REMEMBERED:
            table.popitem(last=False)
        return value
