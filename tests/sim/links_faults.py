"""Planted faults of the links: each is a mistake one could make in LinkSessions. The simulator must catch every one."""

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace

from dilocox_peer.errors import ProtocolError
from dilocox_peer.peer.links.dialling import Dial, Dialling, HangUp
from dilocox_peer.peer.links.greeting import Hello
from dilocox_peer.peer.links.sessions import Greet, LinkAction, LinkSessions, LinkState
from dilocox_peer.peer.links.shunned import Shunned
from dilocox_peer.types import LinkId, PeerId

Check = Callable[[LinkId, bytes], Hello]


class _GreetsAtOnce(LinkSessions):
    """Greets a link as soon as it hears of it: of two that came one after the other, the second twice."""

    def opened(self, link: LinkId, now: float) -> list[LinkAction]:
        out = super().opened(link, now)
        if link in self._to_greet:
            del self._to_greet[link]
            out.append(Greet(link))
        return out


class _GreetsNoMore(LinkSessions):
    """Does not greet a link any more that has greeted first."""

    def greeting(self, link: LinkId, raw: bytes, now: float) -> list[LinkAction]:
        out = super().greeting(link, raw, now)
        self._to_greet.pop(link, None)
        return out


class _TakesEachGreeting(LinkSessions):
    """Lets a link greet for another peer when it has greeted before."""

    def greeting(self, link: LinkId, raw: bytes, now: float) -> list[LinkAction]:
        session = self._sessions.get(link)
        if session is not None and session.state is LinkState.SETTLED:
            session.state, session.hello = LinkState.GREETING, None
        return super().greeting(link, raw, now)


class _KeepsBoth(LinkSessions):
    """Lets a peer have two sessions on two links."""

    def greeting(self, link: LinkId, raw: bytes, now: float) -> list[LinkAction]:
        before = dict(self._settled)
        self._settled.clear()
        out = super().greeting(link, raw, now)
        self._settled = before | self._settled
        return out


class _LeavesTheOldLink(LinkSessions):
    """Does not hang up the link that a peer had before."""

    def greeting(self, link: LinkId, raw: bytes, now: float) -> list[LinkAction]:
        out = super().greeting(link, raw, now)
        return [action for action in out if not isinstance(action, HangUp) or action.link == link]


class _BelievesAnyone(LinkSessions):
    """Takes a greeting that proves nothing for one of a peer."""

    def __init__(self, stage: int, check: Check) -> None:
        def believe(link: LinkId, raw: bytes) -> Hello:
            try:
                return check(link, raw)
            except ProtocolError:
                return Hello(PeerId("anyone"), stage + 1, 1)

        super().__init__(stage, believe)


class _TakesAnyStage(LinkSessions):
    """Takes a peer of any stage for one of the next."""

    def __init__(self, stage: int, check: Check) -> None:
        super().__init__(stage, lambda link, raw: replace(check(link, raw), stage=stage + 1))


class _BelievesLeases(LinkSessions):
    """Refuses a greeting that is not of the peer whose lease names the link, as the conveyor did: any lease can have any
    peer shunned."""

    def greeting(self, link: LinkId, raw: bytes, now: float) -> list[LinkAction]:
        with suppress(ProtocolError):
            peer, claimed_by = self._check(link, raw).peer, self._dialling.claimed_by(link)
            if claimed_by and peer not in claimed_by:
                return self.refused(link, "another peer answers at this link than its lease says", now)
        return super().greeting(link, raw, now)


class _KeepsTheLost(LinkSessions):
    """Forgets a lost link, and not the session that it was."""

    def lost(self, link: LinkId, reason: str, now: float) -> list[LinkAction]:
        self._to_greet.pop(link, None)
        self._sessions.pop(link, None)
        return []


class _WaitsForEver(LinkSessions):
    """Keeps links that say nothing."""

    def tick(self, now: float) -> list[LinkAction]:
        self._silent_at = float("inf")
        return super().tick(now)


class _ShunsTheSlow(LinkSessions):
    """Blames a neighbour for what linkd does not take."""

    def congested(self, link: LinkId, now: float) -> list[LinkAction]:
        out = super().congested(link, now)
        self._shunned.add(link, now)
        self._dialling.left(link, self._shunned.until(link))
        return out


class _CountsTwice(LinkSessions):
    """Counts each end of linkd twice."""

    def linkd_ended(self, reason: str, now: float) -> list[LinkAction]:
        self._restarts.append(now)
        return super().linkd_ended(reason, now)


class _NeverForgives(LinkSessions):
    """Counts all ends of linkd there ever were."""

    def linkd_ended(self, reason: str, now: float) -> list[LinkAction]:
        for index in range(len(self._restarts)):
            self._restarts[index] = now
        return super().linkd_ended(reason, now)


class _ForgetsItHungUp(Dialling):
    """Takes what was hung up for dialled, as the conveyor did: linkd has forgotten it."""

    def left(self, link: LinkId, until: float) -> None: ...


class _DialsTheShunned(Dialling):
    """Dials again at once."""

    def left(self, link: LinkId, until: float) -> None:
        super().left(link, float("-inf"))


class _DialsNoMore(Dialling):
    """Dials what rests when leases are read again, and not when its time is over."""

    def due(self, now: float, up: Collection[LinkId]) -> list[Dial | HangUp]:
        orders = super().due(now, up)
        self.deadline = float("inf")
        return orders


class _DialsForEver(Dialling):
    """Has linkd dial what nobody wants any more, once it has been linked."""

    def lost(self, link: LinkId) -> None: ...


class _HearsTheShunned(Shunned):
    def has(self, link: LinkId, now: float) -> bool:
        return False


def _with(*, dialling: type[Dialling] = Dialling, shunned: type[Shunned] = Shunned) -> type[LinkSessions]:
    """LinkSessions with these parts."""

    class Planted(LinkSessions):
        def __init__(self, stage: int, check: Check) -> None:
            super().__init__(stage, check)
            self._dialling, self._shunned = dialling(), shunned()

    return Planted


FAULTS: dict[str, type[LinkSessions]] = {
    "greetings sent at once": _GreetsAtOnce,
    "no greeting for one that came first": _GreetsNoMore,
    "a second greeting": _TakesEachGreeting,
    "two sessions of a peer": _KeepsBoth,
    "the old link stays": _LeavesTheOldLink,
    "a greeting that proves nothing": _BelievesAnyone,
    "a neighbour of any stage": _TakesAnyStage,
    "leases are believed": _BelievesLeases,
    "a lost link is kept": _KeepsTheLost,
    "silence is waited for": _WaitsForEver,
    "the slow are shunned": _ShunsTheSlow,
    "an end of linkd counted twice": _CountsTwice,
    "ends of linkd never forgiven": _NeverForgives,
    "hung up and taken for dialled": _with(dialling=_ForgetsItHungUp),
    "the shunned are dialled": _with(dialling=_DialsTheShunned),
    "what rests is not dialled again": _with(dialling=_DialsNoMore),
    "what nobody wants is dialled": _with(dialling=_DialsForEver),
    "the shunned are heard": _with(shunned=_HearsTheShunned),
}
