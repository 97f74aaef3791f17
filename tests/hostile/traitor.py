"""A member that forges: `python -m tests.hostile.traitor ORDERS ACCOMPLICES` and then what `dilocox-peer` takes; the accomplices are
PeerIDs with commas between.

It is an honest peer, with a seat that it has earned, until the file ORDERS appears: JSON, {"keys": [FILES], "back": N}. From
then on it shows, every second, a chain of its own from N rounds before its head on, to the run's last round: signed with its own key,
with those of its accomplices (the files), and with made-up ones; and it serves a state for it. Beside that it goes on as a
member, so that the others keep it in the roster: the strongest place to forge from.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from dilocox_peer.peer import averaging
from dilocox_peer.peer.averaging import Averaging
from dilocox_peer.peer.identity import read_key
from dilocox_peer.peer.rounds.contract import Action, Input, Received, Send
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.state.statesync import States
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.signing import SigningKey
from dilocox_peer.store.store import Content
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate
from dilocox_peer.wire.rounds import MAX_PAGE, ChainPage, GetChain, Heartbeat
from tests.hostile.forger import tell
from tests.hostile.forgery import branch, sybils

EVERY_S = 1.0
ORDERS = Path()
ACCOMPLICES: set[PeerId] = set()
STATE: list[AnchorState] = []  # what is served for a forged head: one for all of them
ROUNDS: dict[Digest, int] = {}  # of the forged heads, ours and our accomplices'
MAX_ROUNDS = 100_000


class Forges(RoundMachine):
    """The very machine of a peer, and a forger beside it."""

    _next_s = 0.0
    _forged: tuple[Certificate, ...] = ()
    _shown = 0

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._outsiders = sybils(seed=os.urandom(8))
        self._insiders: dict[PeerId, SigningKey] = {}
        self._told: dict[str, Any] = {}

    def deadline(self) -> float | None:
        due = super().deadline()
        return min(due, self._next_s) if due is not None and self._insiders else due

    def handle(self, event: Input, now: float, *, more: bool = False) -> list[Action]:
        if isinstance(event, Received) and event.sender in ACCOMPLICES and isinstance(event.message, ChainPage):
            # It is not taken in by its accomplices, of whom one may have its orders before it has its own.
            ROUNDS.update((each.head, each.value.round) for each in event.message.certificates)
            return []
        actions = super().handle(event, now, more=more)
        if now >= self._next_s:
            self._next_s = now + EVERY_S
            self._read_orders()
            if self._insiders and self.round:
                self._forge()
                actions += self._show(sorted(self._members.alive(now)))
        if isinstance(event, Received) and isinstance(event.message, GetChain):
            actions += self._show([event.sender])
        return actions

    def _read_orders(self) -> None:
        try:
            orders = json.loads(ORDERS.read_text())
        except (OSError, ValueError):
            return
        if orders != self._told:
            self._told = orders
            keys = (read_key(path, flag="keys") for path in orders["keys"])
            self._insiders = {key.peer_id: key for key in keys}
            self._forged, self._shown = (), 0

    def _forge(self) -> None:
        start, back = self._chain.height, self._told["back"]
        while start > 1 and self._chain.place.round - self._chain.place_at(start).round < back:
            start -= 1
        self._forged = (
            *self._chain.certificates[:start],
            *branch(
                self._chain.place_at(start), insiders=self._insiders, outsiders=self._outsiders, bounds=self._owner.plans,
                max_peers=self._owner.max_peers, state_digest=STATE[0].digest,
            ),
        )  # fmt: skip
        if len(ROUNDS) > MAX_ROUNDS:
            ROUNDS.clear()
        ROUNDS.update((each.head, each.value.round) for each in self._forged[start:])
        self._shown += 1
        place, tip = self._chain.place_at(start), self._forged[-1]
        signers = {peer for peer, _ in self._forged[start].signatures} & set(place.roster)
        tell(
            "TraitorActed", keys=len(self._insiders), votes=len(signers), roster=len(place.roster), shown=self._shown,
            round=place.round, forged_round=tip.value.round,
        )  # fmt: skip

    def _show(self, peers: list[PeerId]) -> list[Action]:
        if not self._forged:
            return []
        tip, value = self._forged[-1], self._forged[-1].value
        start = next((at for at, each in enumerate(self._forged) if self._chain.height_of(each.head) is None), 0)
        beat = Heartbeat(
            0, tip.head, tip.view, self._owner.incarnation, value.height, value.round, 2**40, value.round + 1, 0, True,
            STATE[0].digest,
        )  # fmt: skip
        actions: list[Action] = []
        for peer in peers:
            actions.append(Send(peer, beat))
            for at in range(start, len(self._forged), MAX_PAGE):
                page = self._forged[at : at + MAX_PAGE]
                actions.append(Send(peer, ChainPage(0, tip.head, tip.view, page, at + len(page) < len(self._forged))))
        return actions


def turn() -> None:
    """What this process makes of its rounds from now on."""
    averaging.RoundMachine = Forges  # type: ignore[attr-defined]
    content, begin = States.content, Averaging.serve

    def lie(self: States, name: Digest) -> Content | None:
        if (found := content(self, name)) is not None or name != STATE[0].digest:
            return found
        tell("StateServed", digest=name.hex())
        return STATE[0]

    async def begin_with_a_state(self: Averaging) -> None:
        nothing = bytes(4 * self._layout.num_elements)
        made = await asyncio.to_thread(
            AnchorState.of, self._layout, head=self.machine.head, round_number=0, anchor=nothing, momentum=nothing
        )
        STATE.append(made)
        await begin(self)

    States.content = lie  # type: ignore[method-assign]
    Averaging.serve = begin_with_a_state  # type: ignore[method-assign]


if __name__ == "__main__":
    ORDERS = Path(sys.argv[1])
    ACCOMPLICES.update(map(PeerId, sys.argv[2].split(",")))
    del sys.argv[1:3]
    turn()
    from dilocox_peer.__main__ import main

    main()
