"""A seeded world of real LinkSessions: one heap of (time, event), linkds that dial, lose links and crash, and strangers.

Each honest node is a process of a stage: LinkSessions, a thread that polls its linkd now and then, and keeps of linkd what
network/link.py keeps. Greetings are the real ones, signed and checked. As in life the thread is behind its linkd: a link can
end and come again between two polls. The promises of sessions.py are checked after every turn, by their numbers.
"""

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

from dilocox_peer.errors import ProtocolError
from dilocox_peer.events import Failed
from dilocox_peer.peer.links.dialling import MAX_DIALLED, Dial, HangUp, LinkAddress
from dilocox_peer.peer.links.greeting import Greeter, Hello
from dilocox_peer.peer.links.sessions import (
    FAULTS_UNTIL_DROPPED,
    GREETING_S,
    MAX_RESTARTS,
    REST_S,
    RESTART_PAUSE_S,
    RESTARTS_WITHIN_S,
    Cause,
    GiveUp,
    Greet,
    Hand,
    LinkAction,
    LinkSessions,
    LinkState,
    Proved,
    StartLinkd,
    Tell,
)
from dilocox_peer.peer.links.shunned import LINES_PER_MINUTE, MAX_SHUNNED, SHUN_S
from dilocox_peer.pipeline import contract
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import LinkId, PeerId, RunId
from tests.sim.clockwork import Clockwork

from .invariants import Violation

RUN, OTHER_RUN = RunId("the run"), RunId("another run")
MAX_NEIGHBOURS = 6  # links that others may make, at each linkd
REDIAL_FIRST_S, REDIAL_MOST_S = 0.5, 15.0  # of linkd
DEAD_S = 15.0  # a side may notice so late that a link is gone
LINKD_START_S = 1.0

# ---- greetings, made and checked once for all seeds ------------------------------------------------------------------


@cache
def key_of(number: int) -> SigningKey:
    return SigningKey(number.to_bytes(32, "big"))


@cache
def thief_of(number: int, victim: int) -> SigningKey:
    """Signs with its own key, and says it is another."""
    key = SigningKey(number.to_bytes(32, "big"))
    key.peer_id = key_of(victim).peer_id
    return key


@cache
def hello(key: SigningKey, run: RunId, link: LinkId, to: LinkId, stage: int, incarnation: int) -> bytes:
    return Greeter(key, run, lambda: link, stage, incarnation).hello(to)


@cache
def _checked(receiver: LinkId, link: LinkId, raw: bytes) -> Hello | str:
    try:
        return Greeter(key_of(1), RUN, lambda: receiver, 0, 1).checked(link, raw)
    except ProtocolError as error:
        return error.reason


def check(receiver: LinkId, link: LinkId, raw: bytes) -> Hello:
    """As Greeter.checked of the receiver; nothing of the receiver but its link is in it."""
    found = _checked(receiver, link, raw)
    if isinstance(found, str):
        raise ProtocolError(None, found)
    return found


# ---- linkd -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Frame:
    """greeting: of one that greets. is_bad: breaks the protocol."""

    greeting: bytes | None = None
    is_bad: bool = False


@dataclass(eq=False)
class Wire:
    """One link between two linkds, as long as it lasts. A side that has not noticed its end still has it."""

    number: int
    latency_s: float
    since: float
    is_dead: bool = False
    greeted: Counter[LinkId] = field(default_factory=Counter)  # by who sent the greeting
    bad: Counter[LinkId] = field(default_factory=Counter)  # frames refused, by who sent them
    opened_at: dict[LinkId, float] = field(default_factory=dict)  # by who was told
    hung_up: set[LinkId] = field(default_factory=set)  # by whom


@dataclass(frozen=True, slots=True)
class Up:
    link: LinkId
    wire: Wire


@dataclass(frozen=True, slots=True)
class Down:
    link: LinkId
    wire: Wire


@dataclass(frozen=True, slots=True)
class Came:
    link: LinkId
    wire: Wire
    frame: Frame


@dataclass(frozen=True, slots=True)
class Near:
    link: LinkId


@dataclass(frozen=True, slots=True)
class Ended:
    pass


Heard = Up | Down | Came | Near | Ended


class Linkd:
    """What link_neighbours.py does, link by link: keeps whom it was told to dial linked, and has one link to each other."""

    def __init__(self, world: "LinksWorld", link_id: LinkId, owner: "Node | Stranger", *, is_dialable: bool) -> None:
        self.world, self.link_id, self.owner = world, link_id, owner
        self.is_dialable = is_dialable
        self.is_up = True
        self.links: dict[LinkId, Wire] = {}
        self._dialling: dict[LinkId, int] = {}  # attempts that failed
        self._tokens: dict[LinkId, object] = {}
        world.linkds[link_id] = self

    def dial(self, other: LinkId) -> None:
        if other not in self._dialling and self.is_up:
            self._dialling[other] = 0
            self._attempt_after(other, 0.0)

    def hang_up(self, other: LinkId) -> None:
        self._dialling.pop(other, None)
        wire = self.links.get(other)
        if wire is not None:
            self.world.break_wire(wire, self.link_id, other, 0.0, wire.latency_s)

    @property
    def dialled(self) -> list[LinkId]:
        return list(self._dialling)

    def stop_dialling(self, other: LinkId) -> None:
        """And keep the link, if there is one; a stranger can."""
        self._dialling.pop(other, None)

    def _attempt_after(self, other: LinkId, delay_s: float) -> None:
        self._tokens[other] = token = object()
        self.world.at(self.world.now + delay_s, partial(self._attempt, other, token))

    def _attempt(self, other: LinkId, token: object) -> None:
        if not self.is_up or other not in self._dialling or self._tokens.get(other) is not token or other in self.links:
            return
        wire = self.world.connect(self, other)
        if wire is None:
            self._fail(other)

    def _fail(self, other: LinkId) -> None:
        failed = self._dialling[other] = self._dialling[other] + 1
        self._attempt_after(other, min(REDIAL_MOST_S, REDIAL_FIRST_S * 2**failed) * self.world.rng.uniform(0.5, 1.0))

    def has_room_for(self, other: LinkId) -> bool:
        if other in self.links or other in self._dialling:
            return True
        return sum(each not in self._dialling for each in self.links) < MAX_NEIGHBOURS

    def up(self, other: LinkId, wire: Wire) -> None:
        self.links[other] = wire
        self.owner.tell(Up(other, wire))

    def down(self, other: LinkId, wire: Wire) -> None:
        """Notices that a link is gone."""
        if self.links.get(other) is not wire:
            return
        del self.links[other]
        self.owner.tell(Down(other, wire))
        if other in self._dialling:
            if self.world.now - wire.since < REDIAL_MOST_S:  # it may hang up on us every time
                self._fail(other)
            else:
                self._dialling[other] = 0
                self._attempt_after(other, 0.0)

    def send(self, other: LinkId, wire: Wire, frame: Frame) -> None:
        """What is for a link that has ended is dropped."""
        if self.links.get(other) is wire:
            self.world.at(self.world.now + wire.latency_s, partial(self.world.arrive, self.link_id, other, wire, frame))

    def end(self) -> None:
        """The process is gone, and its links with it; the others notice soon or late."""
        self.is_up = False
        self._dialling.clear()
        for other, wire in list(self.links.items()):
            late = self.world.rng.choice((0.05, 0.5, DEAD_S))
            self.world.break_wire(wire, self.link_id, other, 0.0, late)


# ---- an honest peer --------------------------------------------------------------------------------------------------


class Node:
    """A peer of a stage. Each of its lives is a process with a link identity of its own."""

    def __init__(self, world: "LinksWorld", number: int, stage: int, *, is_dialable: bool) -> None:
        self.world, self.number, self.stage, self.is_dialable = world, number, stage, is_dialable
        self.key = key_of(number)
        self.peer = self.key.peer_id
        self.life = 0
        self.is_up = False
        self.sessions: LinkSessions
        self.linkd: Linkd

    def start(self) -> None:
        self.life += 1
        self.is_up = True
        self.link_id = LinkId(f"link {self.number}.{self.life}")
        self.world.owners[self.link_id] = self.peer
        self.sessions = self.world.machine(self.stage, partial(check, self.link_id))
        self.linkd = Linkd(self.world, self.link_id, self, is_dialable=self.is_dialable)
        self.inbox: list[Heard] = []
        self.view: dict[LinkId, Wire] = {}  # as network/link.py has read so far
        self.dialled: dict[LinkId, tuple[str, ...]] = {}  # as network/link.py keeps it
        self.wanted: tuple[LinkId, ...] = ()
        self.scheduler: dict[PeerId, int] = {}
        self.proved: set[LinkId] = set()  # linkd was told so, of links that are up
        self.shunned_until: dict[LinkId, float] = {}
        self.hung_up_at: dict[LinkId, float] = {}
        self.lines: deque[float] = deque()
        self.ends: list[float] = []
        self.num_blocks = 0  # linkd is started again, or the machine is busy with other things
        self.polls_at = float("inf")

    def kill(self) -> None:
        self.is_up = False
        self.world.count(self.sessions)
        self.linkd.end()

    def tell(self, heard: Heard) -> None:
        """From linkd; read by the next poll, as all that comes before it."""
        if self.is_up:
            self.inbox.append(heard)
            self._poll_by(self.world.now + self.world.rng.choice((0.0, 0.01, 0.2)))

    def crash_linkd(self) -> None:
        """Its end is told by the parent's own socket: the links first, then that."""
        self.linkd.end()
        self.tell(Ended())

    def want(self, leases: list[LinkAddress]) -> None:
        """By another thread, which wakes this one."""
        self.wanted = tuple(lease.link for lease in sorted(leases, key=lambda lease: lease.peer)[:MAX_DIALLED])
        self.sessions.want(leases, self.world.now)
        self._poll_by(self.world.now)

    # ---- the thread

    def _poll_by(self, time: float) -> None:
        if time < self.polls_at:  # inf is not
            self.polls_at = time
            self.world.at(time, partial(self._poll, self.life))

    def _poll(self, life: int) -> None:
        if life != self.life or not self.is_up or self.num_blocks or self.polls_at > self.world.now:
            return
        self.polls_at = float("inf")
        batch, self.inbox = self.inbox, []
        for heard in batch:
            match heard:
                case Up(link, wire):
                    self.view[link] = wire
                case Down(link, wire) if self.view.get(link) is wire:
                    del self.view[link]
                    self.proved.discard(link)
                case Ended():
                    self.view.clear()
                    self.proved.clear()
        for heard in batch:
            self._take(heard)
            if not self.is_up:
                return
        self.act(self.sessions.tick(self.world.now))
        self.world.check(self)
        self._poll_by(max(self.world.now, self.sessions.deadline))

    def _take(self, heard: Heard) -> None:
        sessions, now = self.sessions, self.world.now
        match heard:
            case Up(link, wire):
                wire.opened_at[self.link_id] = now
                self.act(sessions.opened(link, now))
            case Down(link, _):
                self.act(sessions.lost(link, "gone", now))
            case Came(link, wire, frame):
                self._came(link, wire, frame)
            case Near(link):
                self.act(sessions.found(link, (f"near {link}",)))
            case Ended():
                self._linkd_ended()

    def _came(self, link: LinkId, wire: Wire, frame: Frame) -> None:
        sessions, now = self.sessions, self.world.now
        before = sessions.state_of(link)
        if frame.greeting is not None:
            self.act(sessions.greeting(link, frame.greeting, now))
            proves = _checked(self.link_id, link, frame.greeting)
            is_bad = isinstance(proves, str) or abs(proves.stage - self.stage) != 1
        elif frame.is_bad:
            self.act(sessions.refused(link, "bad", now))
            is_bad = True
        else:  # one that is no fault, whoever it is from; heard if there is a session
            is_bad = False
            if sessions.peer_of(link) is not None:
                self.act(sessions.measured(link, 2 * wire.latency_s))
        after = sessions.state_of(link)
        is_second = frame.greeting is not None and before is LinkState.SETTLED
        if before is LinkState.GREETING and is_bad and after is not LinkState.CLOSING:
            raise Violation(f"4: {self} keeps {link}, whose first frame proves nothing: it is {after.value}")
        if before is LinkState.SETTLED and (is_bad or is_second):
            wire.bad[link] += 1
            if (after is LinkState.CLOSING) != (wire.bad[link] >= FAULTS_UNTIL_DROPPED):
                raise Violation(f"{self} has {link} {after.value} after {wire.bad[link]} faults")
        if after is LinkState.CLOSING is not before:
            self.shunned_until[link] = now + SHUN_S
            if link in self.world.honest_links and link not in self.world.misbehaved:
                raise Violation(f"6: {self} shuns {link}, which has kept to the protocol")

    def _linkd_ended(self) -> None:
        now = self.world.now
        self.ends.append(now)
        times = sum(now - end <= RESTARTS_WITHIN_S for end in self.ends)
        actions = self.sessions.linkd_ended("crashed", now)
        found = [action for action in actions if isinstance(action, StartLinkd | GiveUp)]
        pause_s = RESTART_PAUSE_S * 2 ** (times - 2) if times > 1 else 0.0
        if [type(action) for action in found] != [StartLinkd if times <= MAX_RESTARTS else GiveUp] or (
            times <= MAX_RESTARTS and found != [StartLinkd(pause_s)]
        ):
            raise Violation(f"12: {found} at end {times} of linkd")
        self.act(actions)

    def act(self, actions: list[LinkAction]) -> None:
        for action in actions:
            if self.world.tracing is not None:
                self.world.trace(f"{self} {action}")
            match action:
                case Greet(link):
                    self._greet(link)
                case Proved(link):
                    self.proved.add(link)
                case Dial(link, addresses):
                    self.dialled[link] = addresses
                    self.linkd.dial(link)
                case HangUp(link):
                    self.dialled.pop(link, None)
                    self.hung_up_at[link] = self.world.now
                    if link in self.view:
                        self.view[link].hung_up.add(self.link_id)
                    self.linkd.hang_up(link)
                case Hand(contract.Linked(peer, stage)):
                    if peer in self.scheduler:
                        raise Violation(f"2: {self} tells the scheduler twice that it is linked with {peer}")
                    self.scheduler[peer] = stage
                    self._settled(peer, stage)
                case Hand(contract.Unlinked(peer)):
                    if self.scheduler.pop(peer, None) is None:
                        raise Violation(f"2: {self} tells the scheduler of the loss of {peer}, which it does not know")
                case Hand(contract.RoundTrip(peer, _)):
                    if peer not in self.scheduler:
                        raise Violation(f"2: {self} tells the scheduler a round trip to {peer}, which it does not know")
                case Tell(Failed()):
                    self.lines.append(self.world.now)
                case StartLinkd(pause_s):
                    self.num_blocks += 1
                    self.world.at(self.world.now + pause_s + LINKD_START_S, partial(self._linkd_again, self.life))
                case GiveUp():
                    self.world.die(self, 1.0)
                    return

    def _greet(self, link: LinkId) -> None:
        wire = self.view.get(link)
        if wire is None:
            return  # network/link.py sends nothing to what it knows is down
        wire.greeted[self.link_id] += 1
        if wire.greeted[self.link_id] > 1:
            raise Violation(f"3: {self} greets {link} again on one link")
        raw = hello(self.key, RUN, self.link_id, link, self.stage, self.life)
        self.linkd.send(link, wire, Frame(greeting=raw))

    def _settled(self, peer: PeerId, stage: int) -> None:
        link = self.sessions.link_of(peer)
        if link is None or self.world.owners.get(link) != peer or abs(stage - self.stage) != 1:
            raise Violation(f"4: {self} takes {link} for {peer} of stage {stage}")
        if link not in self.proved:
            raise Violation(f"13: {self} is linked over {link}, for which linkd holds next to nothing")

    def _linkd_again(self, life: int) -> None:
        if life != self.life or not self.is_up:
            return
        self.linkd.is_up = True
        for link in self.dialled:
            self.linkd.dial(link)
        self._go_on(life)

    def hold_up(self, seconds: float) -> None:
        """Its thread does not come round meanwhile."""
        self.num_blocks += 1
        self.world.at(self.world.now + seconds, partial(self._go_on, self.life))

    def _go_on(self, life: int) -> None:
        if life == self.life and self.is_up:
            self.num_blocks -= 1
            self.polls_at = float("inf")
            self._poll_by(self.world.now)

    # ---- what it sends

    def say(self, peer: PeerId, frame: Frame, *, is_taken: bool = True) -> None:
        """A frame to a neighbour; is_taken: linkd has room for it."""
        link = self.sessions.link_of(peer)
        if link is None or self.num_blocks or self.inbox:  # as in life all that was told is taken in first
            return
        if not is_taken:
            self.act(self.sessions.congested(link, self.world.now))
            self._poll_by(self.world.now)
            return
        if self.view[link].greeted[self.link_id] != 1:
            raise Violation(f"3: {self} speaks to {link} without a greeting")
        self.linkd.send(link, self.view[link], frame)

    def __str__(self) -> str:
        return f"{self.number}.{self.life}"


# ---- others ----------------------------------------------------------------------------------------------------------


class Stranger:
    """A linkd whose owner keeps to nothing. on_up and on_frame say what it does to a node when a link is up, or told something."""

    def __init__(self, world: "LinksWorld", link_id: LinkId) -> None:
        self.world = world
        self.linkd = Linkd(world, link_id, self, is_dialable=True)
        self.on_up: Callable[[LinkId, Wire], None] = lambda link, wire: None
        self.on_frame: Callable[[LinkId, Frame], None] = lambda link, frame: None

    def tell(self, heard: Heard) -> None:
        match heard:
            case Up(link, wire):
                self.on_up(link, wire)
            case Came(link, _, frame):
                self.on_frame(link, frame)

    def send(self, link: LinkId, frame: Frame) -> None:
        wire = self.linkd.links.get(link)
        if wire is not None:
            self.linkd.send(link, wire, frame)


# ---- the world -------------------------------------------------------------------------------------------------------


class LinksWorld(Clockwork):
    def __init__(self, seed: int, machine: type[LinkSessions], tracing: Callable[[str], None] | None = None) -> None:
        super().__init__(tracing)
        self.rng = random.Random(seed)
        self.machine = machine
        self.nodes: list[Node] = []
        self.linkds: dict[LinkId, Linkd] = {}
        self.owners: dict[LinkId, PeerId] = {}  # who may speak over a link
        self.misbehaved: set[LinkId] = set()
        self.cut: set[frozenset[LinkId]] = set()
        self.moves: Counter[tuple[LinkState, Cause]] = Counter()
        self.latencies_s = self.rng.choice(((0.0, 0.01), (0.05, 0.3), (0.0, 1.0)))
        self._num_wires = 0

    @property
    def honest_links(self) -> set[LinkId]:
        return {node.link_id for node in self.nodes if node.is_up}

    def count(self, sessions: LinkSessions) -> None:
        self.moves.update(sessions.moves)

    def die(self, node: Node, back_after_s: float) -> None:
        if node.is_up:
            self.trace(f"{node} dies")
            node.kill()
            self.at(self.now + back_after_s, node.start)

    def near(self, link: LinkId) -> Near:
        return Near(link)

    # ---- links

    def connect(self, dialler: Linkd, other: LinkId) -> Wire | None:
        """A link at both ends, or what is there already; None if there can be none now."""
        target = self.linkds.get(other)
        if target is None or not target.is_up or not target.is_dialable or self._is_cut(dialler.link_id, other):
            return None
        if not target.has_room_for(dialler.link_id):
            return None
        old = target.links.get(dialler.link_id)
        if old is not None:  # it has not noticed the end of the last one
            target.down(dialler.link_id, old)
        self._num_wires += 1
        wire = Wire(self._num_wires, self.rng.uniform(*self.latencies_s), self.now)
        self.trace(f"link {wire.number} of {dialler.link_id} to {other}")
        target.up(dialler.link_id, wire)
        dialler.up(other, wire)
        return wire

    def _is_cut(self, one: LinkId, other: LinkId) -> bool:
        return frozenset((one, other)) in self.cut

    def break_wire(self, wire: Wire, one: LinkId, other: LinkId, one_s: float, other_s: float) -> None:
        """It is gone; each side notices after its time."""
        wire.is_dead = True
        for side, far, late_s in ((one, other, one_s), (other, one, other_s)):
            if late_s:
                self.at(self.now + late_s, partial(self.linkds[side].down, far, wire))
            else:
                self.linkds[side].down(far, wire)

    def arrive(self, sender: LinkId, to: LinkId, wire: Wire, frame: Frame) -> None:
        linkd = self.linkds[to]
        if not wire.is_dead and linkd.links.get(sender) is wire:
            if self.tracing is not None:
                self.trace(f"{sender} -> {to}: {'greeting' if frame.greeting else 'bad' if frame.is_bad else 'frame'}")
            linkd.owner.tell(Came(sender, wire, frame))

    # ---- the promises, after a turn of a node

    def check(self, node: Node) -> None:
        sessions, now = node.sessions, self.now
        linked = sessions.linked
        links = {peer: sessions.link_of(peer) for peer in linked}
        if len(set(links.values())) != len(links):
            raise Violation(f"1: {node} has two sessions on one link: {links}")
        for peer, link in links.items():
            if link not in node.view or sessions.peer_of(link) != peer:
                raise Violation(f"1: {node} has a session with {peer} on {link}, which is down")
        if linked != node.scheduler:
            raise Violation(f"2: {node} is linked with {linked}, and the scheduler knows {node.scheduler}")
        if sessions.num_links != len(node.view):
            raise Violation(f"8: {node} keeps {sessions.num_links} links, and has {len(node.view)}")
        for link, wire in node.view.items():
            state = sessions.state_of(link)
            is_heard = state is LinkState.GREETING or state is LinkState.SETTLED
            if is_heard and wire.greeted[node.link_id] != 1:
                raise Violation(f"3: {node} has not greeted {link}")
            if state is LinkState.GREETING and wire.opened_at[node.link_id] <= now - GREETING_S:
                raise Violation(f"8: {node} waits for a greeting of {link} for ever")
            if state is LinkState.CLOSING and node.link_id not in wire.hung_up:
                raise Violation(f"8: {node} does not hear {link}, and does not hang up")
            if state is LinkState.DOWN:
                raise Violation(f"8: {node} keeps a link that is down, and not {link}")
            if is_heard and node.shunned_until.get(link, now) > now:
                raise Violation(f"5: {node} hears {link} {node.shunned_until[link] - now:.1f} s before its time")
        for link in node.dialled:
            if node.shunned_until.get(link, now) > now:
                raise Violation(f"5: {node} dials {link} {node.shunned_until[link] - now:.1f} s before its time")
        self._check_same_link(node, links)
        if len(sessions.dialled) > MAX_DIALLED + len(node.view) or sessions.num_shunned > MAX_SHUNNED:
            raise Violation(f"8: {node} keeps {len(sessions.dialled)} dialled, {sessions.num_shunned} shunned")
        self._check_dialled(node)
        while node.lines and node.lines[0] <= now - 60.0:
            node.lines.popleft()
        if len(node.lines) > 2 * LINES_PER_MINUTE:  # the end of one minute and the beginning of the next
            raise Violation(f"11: {node} told {len(node.lines)} lines in a minute")

    def _check_same_link(self, node: Node, links: dict[PeerId, LinkId | None]) -> None:
        for other in self.nodes:
            link = links.get(other.peer)
            if link is None or not other.is_up or link != other.link_id:
                continue
            theirs = other.sessions.link_of(node.peer)
            if theirs != node.link_id:
                continue
            ours, wire = node.view[link], other.view.get(theirs)
            if wire is not None and wire is not ours and not wire.is_dead and not ours.is_dead:
                raise Violation(f"7: {node} and {other} use the links {ours.number} and {wire.number}")

    def _check_dialled(self, node: Node) -> None:
        if node.sessions.dialled != node.dialled:
            raise Violation(
                f"9: {node} takes {sorted(node.sessions.dialled)} for dialled, linkd {sorted(node.dialled)}"
            )
        for link in node.wanted:
            rests_until = max(node.shunned_until.get(link, 0.0), node.hung_up_at.get(link, -REST_S) + REST_S)
            if link not in node.dialled and rests_until <= self.now:
                raise Violation(f"9: {node} wants {link}, and does not dial it")
        for link in node.dialled:
            if link not in node.wanted and link not in node.view:
                raise Violation(f"9: {node} dials {link}, which it does not want")


__all__ = ["GREETING_S", "Frame", "LinksWorld", "Node", "Stranger", "Wire", "hello", "key_of", "thief_of"]
