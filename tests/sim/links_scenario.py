"""What happens in a seed of links: nodes of two or three stages, faults of links and linkds, strangers; then quiet, in which
all who want each other must come to be linked, and stay so."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dilocox_peer.peer.links.dialling import LinkAddress
from dilocox_peer.peer.links.sessions import RESTARTS_WITHIN_S, Cause, LinkSessions, LinkState
from dilocox_peer.types import LinkId, PeerId

from .invariants import Violation
from .links_world import OTHER_RUN, RUN, Frame, LinksWorld, Node, Stranger, Wire, hello, key_of, thief_of

LAYOUTS = ((1, 1), (1, 2), (2, 2), (1, 1, 1), (1, 2, 1), (3, 2))
FAULTY_S = 70.0
BOUND_S = 180.0  # a link may be shunned for 60 s, a loss go unnoticed for 15, a silent link last 30, and dialling pause for 15
STAY_S = 20.0
STRANGER = 100  # number of the first one's key


@dataclass(frozen=True)
class LinksOutcome:
    """What a seed came to. linked_s: of quiet, until all were linked."""

    seed: int
    layout: tuple[int, ...]
    linked_s: float
    num_events: int
    moves: Counter[tuple[LinkState, Cause]]


def run_links_seed(
    seed: int, *, machine: type[LinkSessions] = LinkSessions, trace: Callable[[str], None] | None = None
) -> LinksOutcome:
    """Plays a seed to its end; raises Violation, with the seed in it, when a promise breaks."""
    play = _Play(seed, machine, trace)
    try:
        return play.run()
    except (Violation, AssertionError, KeyError) as violation:
        raise Violation(
            f"links seed {seed} {play.layout} at {play.world.now:.3f} s: {type(violation).__name__} {violation}  "
            f"(python -m tests.sim.replay_links {seed} --trace)"
        ) from violation


class _Play:
    def __init__(self, seed: int, machine: type[LinkSessions], trace: Callable[[str], None] | None) -> None:
        rng = random.Random(seed * 7919 + 2)
        self.seed, self.rng = seed, rng
        self.layout = rng.choice(LAYOUTS)
        self.world = LinksWorld(seed, machine, trace)
        self.strangers: list[Stranger] = []
        self.is_quiet = False
        number = 0
        for stage, replicas in enumerate(self.layout):
            for _ in range(replicas):
                number += 1
                self.world.nodes.append(Node(self.world, number, stage, is_dialable=rng.random() < 0.8))

    def run(self) -> LinksOutcome:
        world, rng = self.world, self.rng
        for node in world.nodes:
            node.start()
        for node in world.nodes:
            world.at(rng.uniform(0.0, 2.0), partial(self._read_leases, node))
        acts = (
            (self._break_a_link, 4), (self._crash_a_linkd, 2), (self._kill, 1), (self._cut, 1), (self._look, 4),
            (self._a_stranger_comes, 3), (self._fill_up, 1), (self._misbehave, 1), (self._chat, 6), (self._be_near, 1),
            (self._crash_again_and_again, 0.3), (self._hold_up, 1),
        )  # fmt: skip
        now, rate = 2.0, rng.choice((0.1, 0.3, 0.8))
        faulty_s = FAULTY_S
        if rng.random() < 0.1:  # linkd ends, and again when that is no matter any more
            faulty_s, rate = 2 * FAULTY_S, 0.1
            node = rng.choice(world.nodes)
            for at in (3.0, 4.0 + RESTARTS_WITHIN_S):
                world.at(at, partial(self._crash, node))
        while (now := now + rng.expovariate(rate)) < faulty_s:
            (act,) = rng.choices([act for act, _ in acts], [weight for _, weight in acts])
            world.at(now, act)
        world.run(faulty_s)
        linked_s = self._quiet()
        for node in world.nodes:
            world.count(node.sessions)
        return LinksOutcome(self.seed, self.layout, linked_s, world.num_events, world.moves)

    # ---- what happens

    def _up(self) -> list[Node]:
        return [node for node in self.world.nodes if node.is_up]

    def _neighbours(self, node: Node) -> list[Node]:
        return [other for other in self._up() if abs(other.stage - node.stage) == 1]

    def _break_a_link(self) -> None:
        """Both sides notice, soon or late."""
        self._break_one(self._up(), self.rng.choice(((0.01, 0.01), (0.01, 3.0), (3.0, 15.0))))

    def _break_one(self, nodes: list[Node], late: tuple[float, float]) -> None:
        wires = [(node.linkd, other, wire) for node in nodes for other, wire in node.linkd.links.items()]
        if wires:
            linkd, other, wire = self.rng.choice(wires)
            self.world.break_wire(wire, linkd.link_id, other, *late)

    def _hold_up(self) -> None:
        """A node's thread is held up, and its links end and come again meanwhile."""
        node = self.rng.choice(self.world.nodes)
        if node.is_up:
            node.hold_up(4.0)
            for number in range(4):
                self.world.at(self.world.now + 0.9 * number, partial(self._break_one, [node], (0.01, 0.01)))

    def _crash_a_linkd(self) -> None:
        node = self.rng.choice(self.world.nodes)
        if node.is_up and node.linkd.is_up:
            node.crash_linkd()

    def _crash_again_and_again(self) -> None:
        node = self.rng.choice(self.world.nodes)
        for number in range(7):
            self.world.at(self.world.now + 6.0 * number, partial(self._crash, node))

    def _crash(self, node: Node) -> None:
        if node.is_up and node.linkd.is_up and not self.is_quiet:
            node.crash_linkd()

    def _kill(self) -> None:
        self.world.die(self.rng.choice(self.world.nodes), self.rng.choice((0.2, 5.0)))

    def _cut(self) -> None:
        """Two that cannot reach each other for a while; a link that they have goes with it."""
        node = self.rng.choice(self.world.nodes)
        others = self._neighbours(node)
        if not node.is_up or not others:
            return
        other = self.rng.choice(others)
        pair = frozenset((node.link_id, other.link_id))
        self.world.cut.add(pair)
        self.world.at(self.world.now + self.rng.choice((1.0, 10.0, 40.0)), partial(self.world.cut.discard, pair))
        wire = node.linkd.links.get(other.link_id)
        if wire is not None:
            self.world.break_wire(wire, node.link_id, other.link_id, 1.0, 2.0)

    def _look(self) -> None:
        node = self.rng.choice(self.world.nodes)
        if node.is_up:
            self._read_leases(node)

    def _read_leases(self, node: Node) -> None:
        """What the directory says: not all, some of it old, some of it lies."""
        if not node.is_up:
            return
        rng, leases = self.rng, []
        for other in self._neighbours(node):
            if rng.random() < 0.85:
                life = max(1, other.life - (rng.random() < 0.2))
                addresses = tuple(f"address {each}" for each in range(rng.randrange(1, 4)))
                link = LinkId(f"link {other.number}.{life}")
                truth = LinkAddress(other.peer, link, addresses)
                lie = LinkAddress(key_of(STRANGER + 99).peer_id, link, ("nowhere",))  # another names it as its own
                leases += rng.choices(([truth], [truth, lie], [lie]), (0.8, 0.1, 0.1))[0]
        leases += [
            LinkAddress(key_of(STRANGER).peer_id, stranger.linkd.link_id, ("address",))
            for stranger in self.strangers
            if rng.random() < 0.3
        ]
        node.want(leases)

    def _be_near(self) -> None:
        node = self.rng.choice(self.world.nodes)
        if node.is_up and node.linkd.is_up:
            node.linkd.owner.tell(self.world.near(self.rng.choice(self.world.nodes).link_id))

    def _fill_up(self) -> None:
        """linkd takes no more for a neighbour."""
        node = self.rng.choice(self.world.nodes)
        if node.is_up and node.scheduler:
            node.say(self.rng.choice(sorted(node.scheduler)), Frame(), is_taken=False)

    def _chat(self) -> None:
        for node in self._up():
            for peer in sorted(node.scheduler):
                node.say(peer, Frame())

    def _misbehave(self) -> None:
        """A node breaks the protocol for a while: its neighbours drop it, and take it again in time."""
        node = self.rng.choice(self.world.nodes)
        if not node.is_up or not node.scheduler:
            return
        self.world.misbehaved.add(node.link_id)
        peer = self.rng.choice(sorted(node.scheduler))
        for number in range(self.rng.randrange(1, 5)):
            self.world.at(self.world.now + 0.1 * number, partial(self._say_bad, node, node.life, peer))

    def _say_bad(self, node: Node, life: int, peer: PeerId) -> None:
        if node.is_up and node.life == life:
            node.say(peer, Frame(is_bad=True))

    # ---- strangers

    def _a_stranger_comes(self) -> None:
        """One linkd, or a flood of them, that dials a node, and does what it does each time that it is linked."""
        targets = [node for node in self._up() if node.is_dialable]
        if not targets:
            return
        target, kind = self.rng.choice(targets), self.rng.choice(list(self._kinds()))
        for _ in range(self.rng.choice((1, 1, 1, 12))):
            number = STRANGER + len(self.strangers)
            link = LinkId(f"stranger {number}")
            stranger = Stranger(self.world, link)
            self.strangers.append(stranger)
            stranger.linkd.is_dialable = self.rng.random() < 0.5
            self._kinds()[kind](stranger, number, target)
            stranger.linkd.dial(target.link_id)
            self.world.at(self.world.now + self.rng.choice((2.0, 20.0, 70.0)), partial(self._give_up, stranger))

    def _kinds(self) -> dict[str, Callable[[Stranger, int, Node], None]]:
        return {
            "silent": lambda stranger, number, target: None,
            "of another run": self._of_another_run,
            "noise": self._noise,
            "thief": self._thief,
            "replayer": self._replayer,
            "of a far stage": self._of_a_far_stage,
            "member": self._member,
            "twin": self._member_with_one_peer,
            "many greetings": self._many_greetings,
            "bad member": self._bad_member,
        }

    def _give_up(self, stranger: Stranger) -> None:
        """It dials no more, and keeps the links it has."""
        stranger.linkd.is_dialable = False
        for other in list(stranger.linkd.dialled):
            stranger.linkd.stop_dialling(other)

    def _greeting(self, number: int, link: LinkId, to: LinkId, stage: int) -> Frame:
        return Frame(greeting=hello(key_of(number), RUN, link, to, stage, 1))

    def _of_another_run(self, stranger: Stranger, number: int, target: Node) -> None:
        raw = hello(key_of(STRANGER), OTHER_RUN, stranger.linkd.link_id, target.link_id, target.stage + 1, 1)
        stranger.on_up = lambda link, wire: stranger.send(link, Frame(greeting=raw))

    def _noise(self, stranger: Stranger, number: int, target: Node) -> None:
        frame = self.rng.choice((Frame(greeting=b""), Frame(greeting=b"\x95" * 1000), Frame(is_bad=True)))
        stranger.on_up = lambda link, wire: stranger.send(link, frame)

    def _thief(self, stranger: Stranger, number: int, target: Node) -> None:
        """Says it is a peer that the target knows, and signs with its own key."""
        victim = self.rng.choice(self.world.nodes)
        key = thief_of(STRANGER, victim.number)
        raw = hello(key, RUN, stranger.linkd.link_id, target.link_id, target.stage + 1, 1)
        stranger.on_up = lambda link, wire: stranger.send(link, Frame(greeting=raw))

    def _replayer(self, stranger: Stranger, number: int, target: Node) -> None:
        """Passes greetings on that it gets: of whom it dials to whom it dials."""
        for other in self._neighbours(target):
            stranger.linkd.dial(other.link_id)

        def pass_on(sender: LinkId, frame: Frame) -> None:
            if frame.greeting is not None:
                for link in list(stranger.linkd.links):
                    stranger.send(link, frame)

        stranger.on_frame = pass_on

    def _of_a_far_stage(self, stranger: Stranger, number: int, target: Node) -> None:
        frame = self._greeting(STRANGER, stranger.linkd.link_id, target.link_id, target.stage + 2)
        stranger.on_up = lambda link, wire: stranger.send(link, frame)

    def _member(self, stranger: Stranger, number: int, target: Node, key: int = 0) -> None:
        """Greets as it should, and chats."""
        key = key or STRANGER + 1 + number % 20
        self.world.owners[stranger.linkd.link_id] = key_of(key).peer_id
        frame = self._greeting(key, stranger.linkd.link_id, target.link_id, target.stage + 1)

        def greet(link: LinkId, wire: Wire) -> None:
            if link == target.link_id:
                stranger.send(link, frame)
                stranger.send(link, Frame())

        stranger.on_up = greet

    def _member_with_one_peer(self, stranger: Stranger, number: int, target: Node) -> None:
        """With others of its kind: many links, and one peer."""
        self._member(stranger, number, target, STRANGER)

    def _many_greetings(self, stranger: Stranger, number: int, target: Node) -> None:
        self._member(stranger, number, target)
        greet = stranger.on_up

        def greet_again(link: LinkId, wire: Wire) -> None:
            greet(link, wire)
            for other in range(2):
                stranger.send(
                    link, self._greeting(STRANGER + other, stranger.linkd.link_id, target.link_id, target.stage + 1)
                )

        stranger.on_up = greet_again

    def _bad_member(self, stranger: Stranger, number: int, target: Node) -> None:
        self._member(stranger, number, target)
        greet, count = stranger.on_up, self.rng.randrange(1, 5)

        def greet_and_break(link: LinkId, wire: Wire) -> None:
            greet(link, wire)
            for _ in range(count):
                stranger.send(link, Frame(is_bad=True))

        stranger.on_up = greet_and_break

    # ---- quiet

    def _quiet(self) -> float:
        """No more faults. Of each two neighbours at least one wants the other and can reach it."""
        world, rng = self.world, self.rng
        world.trace("faults stop")
        self.is_quiet = True
        for stranger in self.strangers:
            if stranger.linkd.link_id in world.owners:  # members may fill linkd's places; those who say nothing may not
                stranger.linkd.end()
            self._give_up(stranger)
        world.run(world.now + 6.0)  # who died comes back
        world.cut.clear()
        pairs = [
            (one, other) for one in world.nodes for other in world.nodes if other.stage == one.stage + 1
        ]  # fmt: skip
        wants: dict[Node, list[LinkAddress]] = {node: [] for node in world.nodes}
        due: list[tuple[Node, Node]] = []
        for pair in pairs:
            ways = [(one, other) for one, other in (pair, pair[::-1]) if other.is_dialable]
            if not ways:
                continue
            due.append(pair)
            for one, other in ways if rng.random() < 0.5 else [rng.choice(ways)]:
                wants[one].append(LinkAddress(other.peer, other.link_id, ("address",)))
                if rng.random() < 0.2:
                    wants[one].append(LinkAddress(key_of(STRANGER + 99).peer_id, other.link_id, ("nowhere",)))
        for node, leases in wants.items():
            node.want(leases)
        began = world.now

        def missing() -> list[str]:
            return [f"{one} and {other}" for one, other in due if not _are_linked(one, other)]

        if not world.run(began + BOUND_S, stop=lambda: not missing()) and missing():
            raise Violation(f"10: not linked {BOUND_S:.0f} s after the faults: {missing()}")
        linked_s = world.now - began
        lost = world.run(world.now + STAY_S, stop=lambda: bool(missing()))
        if lost:
            raise Violation(f"10: linked, and then not: {missing()}")
        return linked_s


def _are_linked(one: Node, other: Node) -> bool:
    return (
        one.is_up
        and other.is_up
        and one.sessions.link_of(other.peer) == other.link_id
        and other.sessions.link_of(one.peer) == one.link_id
    )
