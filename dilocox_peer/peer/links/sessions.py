"""Which links are sessions with neighbours: who is greeted, heard, refused, dialled and left alone. Pure.

What links do goes in with the time, and what is to be done about it comes out, in order. Its shell is conveyor.py, which owns
linkd; a greeting is written and checked by greeting.py, given in. At other ends: linkd has authenticated a link identity; a
greeting, signed by a peer, says whose it is, and nothing else is taken from a link before it.

A link passes through the states of MOVES, and through no others. Its promises, which tests/sim/links_world.py checks:

 1. A peer has at most one session, and a session has one link, which is up as far as linkd has said.
 2. The scheduler is told of a peer's link and of its loss in turns, and knows at any moment the peers that have a session.
 3. A link is greeted once each time it comes up, unless it is shunned: then it is hung up unheard.
 4. A session is with whom the link belongs to: its greeting is signed for this link, this receiver and this run, by a peer of
    a stage beside ours that is let in. Whatever else a link says first costs it the link, and SHUN_S.
 5. A link that is shunned is neither heard nor dialled before its time is over.
 6. What one peer does, the hang-up of its link included, is never blamed on another: no link is shunned whose peer keeps to
    the protocol, whatever leases, strangers and lost links there are.
 7. Both ends of a session use the same link, as soon as both know which links have ended.
 8. What is kept is bounded: by the links that are up, MAX_DIALLED and MAX_SHUNNED.
 9. linkd dials what `dialled` says, no more and no less; and who is wanted is dialled, but for pauses of REST_S and SHUN_S.
10. Two neighbours of which one wants the other and reaches it are linked within a bounded time after the last fault, unless
    members of the run hold all of linkd's places.
11. Lines about strangers are at most LINES_PER_MINUTE in each minute.
12. linkd is started again after each end, with pauses that grow, until that is no accident any more: then it is given up.
13. linkd holds next to nothing for a link before its greeting, and is told before the scheduler that it may hold more.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from dilocox_peer.errors import ProtocolError
from dilocox_peer.events import Event, Failed, NeighbourLinked, NeighbourUnlinked
from dilocox_peer.events_of_health import LinkProcessEnded
from dilocox_peer.peer.links.dialling import Dial, Dialling, HangUp, LinkAddress
from dilocox_peer.peer.links.greeting import Hello
from dilocox_peer.peer.links.shunned import Shunned
from dilocox_peer.pipeline import contract
from dilocox_peer.types import LinkId, PeerId

FAULTS_UNTIL_DROPPED = 3
FORGIVEN_S = 600.0  # without another: faults that far apart are no habit
GREETING_S = 30.0  # a link that has said nothing for so long is hung up: linkd holds a bounded number that others made
REST_S = 5.0  # a link that was hung up, and not for a fault, is dialled again after it
MAX_RESTARTS, RESTARTS_WITHIN_S = 5, 120.0  # of linkd: more of them are no accident
RESTART_PAUSE_S = 0.25  # before the second within that time, then twice as long each

# ---- the states of a link, and what moves it -------------------------------------------------------------------------


class LinkState(Enum):
    DOWN = "down"
    GREETING = "greeting"  # up, and its greeting is not here
    SETTLED = "settled"  # a session: its frames are heard
    CLOSING = "closing"  # up as far as we know, and to be hung up; not heard


class Cause(Enum):
    OPENED = "opened"
    OPENED_SHUNNED = "opened while it is shunned"
    GREETED = "a greeting that proves who it is"
    REFUSED = "a first frame that proves nothing"
    SILENT = "no greeting in time"
    FAULT = "a frame that is refused"
    DROPPED = "one refused frame too many"
    REPLACED = "its peer has settled on another link"
    CONGESTED = "it does not take what we send"
    LOST = "the link has ended, or linkd has"


MOVES: Mapping[tuple[LinkState, Cause], LinkState] = {
    (LinkState.DOWN, Cause.OPENED): LinkState.GREETING,
    (LinkState.DOWN, Cause.OPENED_SHUNNED): LinkState.CLOSING,
    (LinkState.GREETING, Cause.GREETED): LinkState.SETTLED,
    (LinkState.GREETING, Cause.REFUSED): LinkState.CLOSING,
    (LinkState.GREETING, Cause.SILENT): LinkState.CLOSING,
    (LinkState.GREETING, Cause.LOST): LinkState.DOWN,
    (LinkState.SETTLED, Cause.FAULT): LinkState.SETTLED,
    (LinkState.SETTLED, Cause.DROPPED): LinkState.CLOSING,
    (LinkState.SETTLED, Cause.REPLACED): LinkState.CLOSING,
    (LinkState.SETTLED, Cause.CONGESTED): LinkState.CLOSING,
    (LinkState.SETTLED, Cause.LOST): LinkState.DOWN,
    (LinkState.CLOSING, Cause.LOST): LinkState.DOWN,
}
"""All legal moves. What else can happen to a link leaves it where it is: a frame while it is closing, its end when it is down."""

SHUNNING = {Cause.REFUSED, Cause.DROPPED}
"""What a link does wrong itself."""

# ---- what is to be done ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Greet:
    """Send our greeting over this link."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class Proved:
    """It is known whose link this is: linkd may hold as much for it as was agreed."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class Hand:
    """The scheduler is to know it."""

    happened: contract.Linked | contract.Unlinked | contract.RoundTrip


@dataclass(frozen=True, slots=True)
class Tell:
    event: Event


@dataclass(frozen=True, slots=True)
class StartLinkd:
    """Again, after so long."""

    pause_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The pipeline has ended for good."""

    reason: str


LinkAction = Greet | Proved | Dial | HangUp | Hand | Tell | StartLinkd | GiveUp


@dataclass(slots=True, eq=False)
class _Session:
    """A link that is up. hello: while it is settled."""

    link: LinkId
    greet_by: float
    state: LinkState = LinkState.DOWN
    hello: Hello | None = None
    faults: int = 0
    fault_at: float = 0.0  # the last one
    rtt_s: float | None = None


class LinkSessions:
    """Every input but `want` gives back what to do; `tick` comes after all that has happened at one time has been put in."""

    def __init__(
        self, stage: int, check: Callable[[LinkId, bytes], Hello], rank: Callable[[PeerId], str] = str
    ) -> None:
        """stage: ours. check: who greets over a link with these bytes; raises ProtocolError. rank: as Dialling; one that nobody else
        knows, as a name costs nothing, and the lowest of a known order are had for the asking."""
        self._stage = stage
        self._check = check
        self._sessions: dict[LinkId, _Session] = {}
        self._settled: dict[PeerId, _Session] = {}
        self._to_greet: dict[LinkId, None] = {}
        self._dialling = Dialling(rank)
        self._shunned = Shunned()
        self._restarts: deque[float] = deque()
        self._silent_at = float("inf")  # when a link may have been silent for too long
        self.moves: Counter[tuple[LinkState, Cause]] = Counter()  # made so far

    # ---- what is known -----------------------------------------------------------------------------------------------

    @property
    def linked(self) -> dict[PeerId, int]:
        """The neighbours that have a session, and their stages."""
        return {peer: session.hello.stage for peer, session in self._settled.items() if session.hello is not None}

    @property
    def rtt_s(self) -> dict[PeerId, float]:
        """Round trips of the neighbours whose links were measured."""
        return {peer: session.rtt_s for peer, session in self._settled.items() if session.rtt_s is not None}

    def link_of(self, peer: PeerId) -> LinkId | None:
        """Where to send what is for a neighbour."""
        session = self._settled.get(peer)
        return None if session is None else session.link

    def peer_of(self, link: LinkId) -> PeerId | None:
        """Whose frames come over a link; None: they are not heard."""
        session = self._sessions.get(link)
        return session.hello.peer if session is not None and session.hello is not None else None

    def __contains__(self, peer: object) -> bool:
        """Whether it has a session."""
        return peer in self._settled

    def state_of(self, link: LinkId) -> LinkState:
        return self._sessions[link].state if link in self._sessions else LinkState.DOWN

    @property
    def dialled(self) -> dict[LinkId, tuple[str, ...]]:
        """What linkd is told to dial now."""
        return self._dialling.dialled

    @property
    def num_links(self) -> int:
        """Links that are up, as far as linkd has said."""
        return len(self._sessions)

    @property
    def num_shunned(self) -> int:
        return len(self._shunned)

    @property
    def deadline(self) -> float:
        """When `tick` has something to do if nothing happens before."""
        return float("-inf") if self._to_greet else min(self._dialling.deadline, self._silent_at)

    # ---- links -------------------------------------------------------------------------------------------------------

    def opened(self, link: LinkId, now: float) -> list[LinkAction]:
        """A link is up, whoever made it. It is greeted by the next `tick`: if it has ended and come again by then, which linkd
        tells at one time, the first greeting would go over the second link, and the second would be one too many."""
        out = self._end(link, "it came up again", now) if link in self._sessions else []
        session = self._sessions[link] = _Session(link, now + GREETING_S)
        if self._shunned.has(link, now):
            return [*out, *self._move(session, Cause.OPENED_SHUNNED, now)]
        self._to_greet[link] = None
        self._silent_at = min(self._silent_at, session.greet_by)
        return [*out, *self._move(session, Cause.OPENED, now)]

    def lost(self, link: LinkId, reason: str, now: float) -> list[LinkAction]:
        """A link has ended, and what was under way on it is lost."""
        return self._end(link, reason, now) if link in self._sessions else []

    def greeting(self, link: LinkId, raw: bytes, now: float) -> list[LinkAction]:
        """A greeting came over a link."""
        session = self._sessions.get(link)
        if session is None or session.state is LinkState.CLOSING:
            return []
        if session.hello is not None:  # one peer a link: all but the last would stay when it ends
            return self._refuse(session, "a second greeting", now)
        try:
            hello = self._check(link, raw)
        except ProtocolError as error:
            return self._refuse(session, error.reason, now)
        if abs(hello.stage - self._stage) != 1:
            return self._refuse(session, f"it holds stage {hello.stage}, no neighbour of stage {self._stage}", now)
        return self._settle(session, hello, now)

    def refused(self, link: LinkId, reason: str, now: float) -> list[LinkAction]:
        """A frame of this link broke the protocol."""
        session = self._sessions.get(link)
        return self._refuse(session, reason, now) if session is not None else []

    def congested(self, link: LinkId, now: float) -> list[LinkAction]:
        """linkd did not take a frame for it: too much waits for it already. What else was sent to its peer may have gone."""
        session = self._sessions.get(link)
        if session is None or session.state is not LinkState.SETTLED:
            return []
        return self._move(session, Cause.CONGESTED, now)

    def measured(self, link: LinkId, seconds: float) -> list[LinkAction]:
        """A round trip over a link."""
        session = self._sessions.get(link)
        if session is None or session.hello is None:
            return []
        session.rtt_s = seconds
        return [Hand(contract.RoundTrip(session.hello.peer, seconds))]

    # ---- whom to dial ------------------------------------------------------------------------------------------------

    def want(self, leases: Iterable[LinkAddress], now: float) -> None:
        """The peers of the stages beside ours that are to be dialled, by the next `tick`. Both sides dial: a newcomer knows
        the others at once, they may read the directory only minutes later."""
        leases = list(leases)
        self._dialling.want(leases)
        for lease in leases:
            if self._shunned.has(lease.link, now):
                self._dialling.left(lease.link, self._shunned.until(lease.link))

    def found(self, link: LinkId, addresses: tuple[str, ...]) -> list[LinkAction]:
        """A link is on this network, at these addresses."""
        return [*self._dialling.nearer(link, addresses)]

    # ---- linkd and the time ------------------------------------------------------------------------------------------

    def linkd_ended(self, reason: str, now: float) -> list[LinkAction]:
        """All links are gone with it. It dials again what it had dialled, once it is started again."""
        out: list[LinkAction] = [Tell(LinkProcessEnded(reason))]
        for link in list(self._sessions):
            out += self._end(link, "our own linkd ended", now)
        self._restarts.append(now)
        while self._restarts[0] < now - RESTARTS_WITHIN_S:
            self._restarts.popleft()
        times = len(self._restarts)
        if times > MAX_RESTARTS:
            return [*out, GiveUp(f"linkd ended {times} times in {RESTARTS_WITHIN_S:.0f} s, the last time: {reason}")]
        return [*out, StartLinkd(RESTART_PAUSE_S * 2 ** (times - 2) if times > 1 else 0.0)]

    def tick(self, now: float) -> list[LinkAction]:
        """What is due: greetings, the ends of those that do not greet, whom to dial."""
        out: list[LinkAction] = [Greet(link) for link in self._to_greet]
        self._to_greet.clear()
        if self._silent_at <= now:
            waiting = [session for session in self._sessions.values() if session.state is LinkState.GREETING]
            for session in waiting:
                if session.greet_by <= now:
                    out += self._move(session, Cause.SILENT, now)
            self._silent_at = min((each.greet_by for each in waiting if each.greet_by > now), default=float("inf"))
        if self._dialling.deadline <= now:
            out += self._dialling.due(now, self._sessions)
        return out

    # ---- moves -------------------------------------------------------------------------------------------------------

    def _move(self, session: _Session, cause: Cause, now: float, reason: str = "") -> list[LinkAction]:
        """Takes a link to the state that MOVES says, and gives back what goes with that. KeyError: no legal move."""
        before, session.state = session.state, MOVES[session.state, cause]
        self.moves[before, cause] += 1
        if session.state in {LinkState.CLOSING, LinkState.DOWN}:
            self._to_greet.pop(session.link, None)
        out: list[LinkAction] = []
        if before is LinkState.SETTLED is not session.state:
            out += self._unsettle(session, reason or cause.value)
        if session.state is LinkState.CLOSING:
            if cause in SHUNNING:
                self._shunned.add(session.link, now)
            self._dialling.left(session.link, max(now + REST_S, self._shunned.until(session.link)))
            out.append(HangUp(session.link))
        return out

    def _end(self, link: LinkId, reason: str, now: float) -> list[LinkAction]:
        self._dialling.lost(link)
        return self._move(self._sessions.pop(link), Cause.LOST, now, reason)

    def _settle(self, session: _Session, hello: Hello, now: float) -> list[LinkAction]:
        out: list[LinkAction] = []
        old = self._settled.get(hello.peer)
        if old is not None:  # it came back, and we have not noticed that it had gone; its old link would stay for ever
            out += self._move(old, Cause.REPLACED, now)
        claimed_by = self._dialling.claimed_by(session.link)
        if claimed_by and hello.peer not in claimed_by and self._shunned.may_tell(now):
            # The lease is wrong, not the greeting: who signed it holds the link, and a lease may name any.
            named = ", ".join(sorted(claimed_by))
            out.append(Tell(Failed("pipeline", f"a lease of {named} names a link that is {hello.peer}'s")))
        out += self._move(session, Cause.GREETED, now)
        session.hello = hello
        self._settled[hello.peer] = session
        out.append(Proved(session.link))
        out.append(Hand(contract.Linked(hello.peer, hello.stage)))
        out.append(Tell(NeighbourLinked(hello.peer, hello.stage)))
        return out

    def _unsettle(self, session: _Session, reason: str) -> list[LinkAction]:
        hello, session.hello = session.hello, None
        assert hello is not None, session
        del self._settled[hello.peer]
        return [Hand(contract.Unlinked(hello.peer)), Tell(NeighbourUnlinked(hello.peer, hello.stage, reason))]

    def _refuse(self, session: _Session, reason: str, now: float) -> list[LinkAction]:
        if session.state is LinkState.CLOSING:
            return []
        out: list[LinkAction] = []
        if self._shunned.may_tell(now):
            who = session.hello.peer if session.hello is not None else session.link
            out.append(Tell(Failed("pipeline", f"a frame of {who} was refused: {reason}")))
        if now - session.fault_at > FORGIVEN_S:
            session.faults = 0
        session.faults, session.fault_at = session.faults + 1, now
        if session.state is LinkState.GREETING:
            return [*out, *self._move(session, Cause.REFUSED, now)]
        is_last = session.faults >= FAULTS_UNTIL_DROPPED
        return [*out, *self._move(session, Cause.DROPPED if is_last else Cause.FAULT, now, reason)]
