"""Peers that send whatever they can sign: members of a roster and strangers, with as many identities as they like.

A hostile member runs the real machine, so that it is believed and seated, and does its mischief beside it; a stranger has
no machine and only the invitation. Neither can sign for an honest peer: all of `_sign` goes through their own keys.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from dilocox_peer.contract import Note
from dilocox_peer.peer.rounds.chain import Place, place_after, vote_for
from dilocox_peer.peer.rounds.contract import Action, Input, Persist, Received, Send
from dilocox_peer.peer.rounds.durable import encode_record
from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Entry, Value, acceptance, offer_statement
from dilocox_peer.wire.checkpoints import Checkpoint, sign_checkpoint
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.rounds import (
    MAX_PAGE,
    Cert,
    ChainPage,
    GetChain,
    Heartbeat,
    Leave,
    Message,
    Offer,
    ViewCall,
    ViewPropose,
    Vouch,
)

from .world import GENESIS, OWNER, Anchor, Node, World, sign_as

REMEMBERED = 60  # messages kept to say again
SYBILS = 15
FAR_ORDER = 2**52  # a vote's order that is always the latest


class Hostile(Node):
    """A node that is counted among the honest nowhere. member: it trains and votes; else it only talks."""

    def __init__(self, world: World, peer: PeerId, *, member: bool) -> None:
        super().__init__(world, peer, 1.0)
        self.member = member
        self.sybils = [PeerId(f"{peer}-{number:02d}") for number in range(SYBILS)]
        self.forged: list[Certificate] = []  # a chain of its own, from genesis on
        self._heard: deque[tuple[PeerId, Message]] = deque(maxlen=REMEMBERED)
        self._started = False
        self._held_back: deque[tuple[PeerId, Message]] = deque(maxlen=REMEMBERED)
        self.holds_back = False

    @property
    def is_hostile(self) -> bool:
        return True

    @property
    def is_up(self) -> bool:
        return self.machine is not None if self.member else self._started

    def start(self, friends: Iterable[PeerId]) -> None:
        if self.member:
            super().start(friends)
        self._started = True
        self._soon(self._mischief, 1.0 + self.world.rng.random())

    def _soon(self, act: Callable[[], None], delay_s: float) -> None:
        self.world.at(self.world.now + delay_s, lambda: act() if self.is_up else None)

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        if self.member:
            super().later(delay_s, act)
        else:
            self._soon(act, delay_s)

    # ---- what it hears ----

    def feed(self, happened: Input) -> None:
        if isinstance(happened, Received):
            self._heard.append((happened.sender, happened.message))
            if isinstance(happened.message, GetChain) and self.forged:
                self._show(happened.sender)
        if self.member and self.machine is not None:
            self._feed_machine(happened)

    def _feed_machine(self, happened: Input) -> None:
        machine, generation = self.machine, self.generation
        assert machine is not None
        for action in machine.handle(happened, self.world.now):
            self.carry_out(action)
            if self.generation != generation:
                return
        deadline = machine.deadline()
        if deadline is not None and deadline < self.ticking_at:
            self.ticking_at, self.ticks = deadline, self.ticks + 1
            self.later(deadline - self.world.now, partial(self._tick, self.ticks))

    def carry_out(self, action: Action) -> None:
        match action:
            case Send(to, message):
                if self.holds_back and isinstance(message, Cert) and self.world.rng.random() < 0.7:
                    self._held_back.append((to, message))
                else:
                    self.world.deliver(self.peer, to, message)
            case Persist(durable):
                self.disk.log += encode_record(durable)
            case Note():
                pass
            case _:
                super().carry_out(action)

    def gives(self, head: Digest) -> Anchor | None:
        """Any state for a head of its own making; else what it has."""
        if any(certificate.head == head for certificate in self.forged):
            return Anchor(sha256(b"made up", head), frozenset())
        return super().gives(head)

    # ---- what it does ----

    def _mischief(self) -> None:
        rng = self.world.rng
        acts = [
            self._forge, self._forge, self._show_all, self._show_all, self._lie_about_head, self._replay, self._call_view_change,
            self._forge_genesis, self._forge_checkpoint, self._tell_held_back, self._say_goodbye_for_fun, self._offer_twice,
        ]  # fmt: skip
        rng.choice(acts)()
        self._soon(self._mischief, rng.choice((0.2, 2.0, 4.0)))

    def _tell(self, message: Message, to: Sequence[PeerId] | None = None) -> None:
        for peer in to or self._victims():
            self.world.deliver(self.peer, peer, message)

    def _victims(self) -> list[PeerId]:
        return [peer for peer in self.world.nodes if peer != self.peer]

    def _forge(self) -> None:
        """A branch of its own from some place of an honest chain: at its end, in its past, at genesis."""
        rng, world = self.world.rng, self.world
        machines = [node.machine for node in world.up() if node.machine is not None]
        if not machines:
            return
        chain = list(rng.choice(machines).chain)
        start = max(len(chain) - rng.choice((0, 0, 0, 1, 2, 3, 8, 1000)), 0)
        if start == 0 and world.owner is None:
            return  # a run without an owner is begun by whoever begins it
        certificates = chain[:start]
        place = place_after(self._genesis(), certificates)
        me_too = [self.peer] if self.member and self.peer in place.roster else []
        roster = rng.choice((me_too or self.sybils, self.sybils, [*me_too, *self.sybils]))
        view = self._certified(
            place, place.view_change(sorted(roster)), roster, view=place.view + rng.choice((1, 1, 5))
        )
        certificates.append(view)
        place = place.then(view)
        for _ in range(rng.choice((0, 1, 5, 5, 30))):
            if len(certificates) >= self.world.longest_chain:
                break
            entries = [Entry(peer, 1, sha256(b"nothing", peer.encode()), 10, 8) for peer in place.roster]
            value = place.round_value(entries, tuple(dict.fromkeys([*place.roster, *self.sybils]))[:16])
            certificates.append(self._certified(place, value, place.roster, view=place.view))
            place = place.then(certificates[-1])
        self.forged = certificates
        self._show_all()

    def _genesis(self) -> Place:
        return self.world.genesis()

    def _certified(self, place: Place, value: Value, signers: Sequence[PeerId], *, view: int) -> Certificate:
        message = acceptance(0, place.head, view, 0, value)
        order = self.world.rng.choice((int(1000 * self.world.now), FAR_ORDER))
        votes = tuple((peer, vote_for(message, order, self._sign(peer))) for peer in sorted(set(signers)))
        return Certificate(0, place.head, view, 0, value, votes)

    def _sign(self, peer: PeerId) -> Callable[[bytes], bytes]:
        assert peer == self.peer or peer in self.sybils, f"{self.peer} cannot sign for {peer}"
        return sign_as(peer)

    def _show_all(self) -> None:
        if not self.forged:
            return
        tip = self.forged[-1]
        value = tip.value
        self._tell(
            Heartbeat(
                0,
                tip.head,
                tip.view,
                incarnation=self.incarnation,
                height=value.height,
                round=value.round,
                weight=2**40,
                training_round=value.round + 1,
                micro_batches=0,
                ready=True,
                state_digest=b"",
            )
        )
        for peer in self._victims():
            self._show(peer)

    def _show(self, peer: PeerId) -> None:
        """Its chain, the last pages of it first where the beginning is known everywhere."""
        start = max(len(self.forged) - self.world.rng.choice((MAX_PAGE, 32, 48)), 0)
        for at in range(start, len(self.forged), MAX_PAGE):
            page = tuple(self.forged[at : at + MAX_PAGE])
            tip = self.forged[-1]
            self._tell(ChainPage(0, tip.head, tip.view, page, at + MAX_PAGE < len(self.forged)), [peer])

    def _lie_about_head(self) -> None:
        rng = self.world.rng
        head = sha256(str(rng.random()).encode())
        beat = Heartbeat(0, head, 3, self.incarnation + 10**6, 2**40, 2**40, 2**40, 2**40, 2**30, True, sha256(b"x"))
        self._tell(beat if not self.member else replaced(beat, incarnation=self.incarnation))

    def _replay(self) -> None:
        """Something that somebody else said, in its own name; and something of long ago."""
        if self._heard:
            _, message = self.world.rng.choice(self._heard)
            self._tell(message)

    def _call_view_change(self) -> None:
        machine = self._an_honest_machine()
        if machine is None or not machine.chain:
            return
        place = place_after(self._genesis(), machine.chain)
        number = place.view + self.world.rng.choice((1, 2, 1000))
        self._tell(ViewCall(0, place.head, place.view, number))
        roster = [self.peer, *place.roster] if self.peer not in place.roster else list(place.roster)
        self._tell(ViewPropose(0, place.head, place.view, number, place.view_change(roster[:16])))

    def _an_honest_machine(self):
        machines = [node.machine for node in self.world.up() if node.machine is not None]
        return self.world.rng.choice(machines) if machines else None

    def _forge_genesis(self) -> None:
        """A first roster that the owner has not signed, and one that says so."""
        genesis = self._genesis()
        roster = sorted([self.peer, *self.sybils])[:16]
        certificate = self._certified(genesis, genesis.view_change(roster), roster, view=1)
        if self.world.owner is not None and self.world.rng.random() < 0.5:
            certificate = replaced(certificate, signatures=((OWNER, certificate.signatures[0][1]),))
        elif self.world.owner is None:
            return  # a run without an owner is begun by whoever begins it
        self._tell(Cert(0, certificate.head, 1, certificate))

    def _forge_checkpoint(self) -> None:
        tip = self.forged[-1] if self.forged else None
        head = tip.head if tip is not None else sha256(b"nowhere")
        height = tip.value.height if tip is not None else 7
        unsigned = Checkpoint(0, GENESIS, height, height, head, 2**50, self.world.rng.random() < 0.5)
        self._tell(Vouch(0, head, 1, sign_checkpoint(unsigned, self._sign(self.peer))))

    def _tell_held_back(self) -> None:
        """What it kept to itself as a leader, when it hurts most."""
        if self.world.rng.random() < 0.3:
            while self._held_back:
                to, message = self._held_back.popleft()
                self.world.deliver(self.peer, to, message)
        self.holds_back = self.world.rng.random() < 0.3

    def _say_goodbye_for_fun(self) -> None:
        machine = self._an_honest_machine()
        if machine is not None and not self.member:
            self._tell(Leave(0, machine.head, machine.view, self.incarnation))

    def _offer(self, head: Digest, view: int, entry: Entry) -> Offer:
        return Offer(0, head, view, entry, self._sign(self.peer)(offer_statement(0, head, entry)))

    def _offer_twice(self) -> None:
        machine = self._an_honest_machine()
        if machine is not None:
            blob = sha256(str(self.world.rng.random()).encode())
            victim = self.world.rng.choice(self._victims())
            self._tell(self._offer(machine.head, machine.view, Entry(victim, 1, blob, 10, 8)))  # in another's name
            if not self.member:
                entry = Entry(self.peer, self.incarnation, blob, 10, 8)
                self._tell(self._offer(machine.head, machine.view, entry))
