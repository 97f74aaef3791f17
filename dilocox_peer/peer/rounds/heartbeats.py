"""What we tell the others of ourselves, when and whom; and which of them have come or gone. Pure."""

from collections.abc import Callable, Collection, Iterable

from dilocox_peer.contract import Note
from dilocox_peer.events import NeighbourLost, NeighbourSeen
from dilocox_peer.peer.rounds.anchorage import Anchorage
from dilocox_peer.peer.rounds.chain import Place
from dilocox_peer.peer.rounds.contract import Action, RoundProgress, Send
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.seat import Owner, send_all
from dilocox_peer.peer.rounds.timing import NEVER
from dilocox_peer.types import PeerId
from dilocox_peer.wire.rounds import Heartbeat, Passed


class Heartbeats:
    """The heartbeats of one peer. due: when the next one goes out. micro_batches: of ours in the round in training.

    A beat is left out for a peer that has just been told something else, as every message is a sign of life: unless what we say of
    ourselves is news, and never two running, as heads and micro-batches are read from heartbeats alone. A beat that is late itself leaves
    out nobody: on a busy machine the next may be late too, and others would count us as gone. A beat of which half the wait is over goes
    out with what the whole roster is told anyway, in the same packets.
    """

    def __init__(self, owner: Owner, members: Members, now: float) -> None:
        self._owner = owner
        self._members = members
        self._beats = 0
        self._were_alive: set[PeerId] = set()
        self._said: Heartbeat | None = None
        self._beat_at = NEVER
        self._told_at: dict[PeerId, float] = {}  # anything, since the last beat
        self._left_out: set[PeerId] = set()  # of the last beat
        self.due = now
        self.micro_batches = 0
        self.is_paused = False

    def progressed(self, progress: RoundProgress, now: float) -> None:
        if progress.tell_now or progress.paused != self.is_paused:
            self.due, self._said = now, None
        self.micro_batches, self.is_paused = progress.micro_batches, progress.paused
        self._members.we_said(micro_batches=self.micro_batches, paused=self.is_paused)

    def closed(self) -> None:
        """Our round is over."""
        self.micro_batches = 0
        self._members.we_said(micro_batches=0, paused=self.is_paused)

    def now(self, place: Place, training_round: int, anchor: Anchorage) -> Heartbeat:
        """What we say of ourselves at this place."""
        return Heartbeat(
            place.stage, place.head, place.view, incarnation=self._owner.incarnation, height=place.height,
            round=place.round, weight=place.weight, training_round=training_round, micro_batches=self.micro_batches,
            ready=anchor.is_computed, state_digest=anchor.digest, paused=self.is_paused,
        )  # fmt: skip

    def told(self, actions: Iterable[Action], now: float) -> None:
        """What goes out to others, of whatever kind."""
        for action in actions:
            if isinstance(action, Send) and not isinstance(action.message, Passed):  # that one says that another lives
                self._told_at[action.to] = now

    def beat(
        self, told_now: Iterable[Action], roster: Collection[PeerId], heartbeat: Callable[[], Heartbeat], now: float
    ) -> list[Action]:
        """Every beat to the roster and to whoever is alive, now and then to the silent ones. told_now: what goes out before it."""
        owner, members = self._owner, self._members
        self.told(told_now, now)
        beat_s = owner.timing.beat_s(len(roster))
        rides = now >= self._beat_at + beat_s / 2 and self._tells_all(told_now, roster)
        if now < self.due and not rides:
            return []
        alive = members.alive(now)
        is_late = now > self.due + beat_s / 2
        self._beat_at, self.due = now, now + beat_s * (0.9 + 0.2 * owner.rng.random())
        self._beats += 1
        told = {*roster, *alive}
        if self._beats % owner.timing.stranger_every == 0:
            told.update(peer for peer in members.known if not members[peer].has_left)  # it says when it is back
        said = heartbeat()
        self._left_out = set() if is_late or rides else self._told_lately(said, now - beat_s / 2) - self._left_out
        self._said, self._told_at = said, {}
        actions: list[Action] = [*send_all(sorted(told - {owner.peer} - self._left_out), said)]
        actions += [Note(NeighbourSeen(peer)) for peer in sorted(alive - self._were_alive)]
        actions += [Note(NeighbourLost(peer, self._why_lost(peer))) for peer in sorted(self._were_alive - alive)]
        self._were_alive = alive
        return actions

    def _tells_all(self, told_now: Iterable[Action], roster: Collection[PeerId]) -> bool:
        told = {each.to for each in told_now if isinstance(each, Send)}
        return len(roster) > 1 and told >= {*roster} - {self._owner.peer}

    def _told_lately(self, said: Heartbeat, lately: float) -> set[PeerId]:
        """Those for whom a beat can be left out: what they were told lately is a sign of life, and this says nothing new."""
        if self._said is None or said.is_news_after(self._said):
            return set()
        return {peer for peer, at in self._told_at.items() if at >= lately}

    def _why_lost(self, peer: PeerId) -> str:
        if peer not in self._members.known:  # any more, where more peers are heard than are remembered
            return "silent"
        seen = self._members[peer]
        return "it left" if seen.has_left else "refuses connections" if seen.refused else "silent"
