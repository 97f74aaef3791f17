"""Following round by round, by contributions, where that is less to fetch than a whole state. Pure.

A state is the anchor and the momentum in full precision; a round's contributions are hundreds of times smaller. So contributions
are kept as long as all of them together are no larger than a state, and a peer that is behind replays as many rounds. One that
fetched a state for forty rounds is forty rounds behind by then, and catches up for what a tenth of another state would cost.
"""

from collections.abc import Collection, Iterable
from statistics import median

from dilocox_peer.contract import Note
from dilocox_peer.events_of_states import LinkTooSlow
from dilocox_peer.peer.planning.sent import PASSING_ROUNDS
from dilocox_peer.peer.rounds.chain import Chain, Suffix
from dilocox_peer.peer.rounds.conduct import Conduct
from dilocox_peer.peer.rounds.contract import FetchBlob
from dilocox_peer.peer.rounds.holdings import Holdings, part_of
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.timing import MAX_REPLAYED, Timing
from dilocox_peer.types import PeerId
from dilocox_peer.wire.chain import Certificate

FETCHED_AHEAD = 4  # certificates whose contributions come while the first is waited for


class Replay:
    """Which way one peer takes to a better chain: round by round, or by a whole state."""

    def __init__(
        self,
        me: PeerId,
        chain: Chain,
        holdings: Holdings,
        members: Members,
        conduct: Conduct,
        timing: Timing,
        state_bytes: int,
    ) -> None:
        """state_bytes: what a donor sends of a whole state; 0: not known, then rounds are counted alone."""
        self._me = me
        self._chain = chain
        self._holdings = holdings
        self._members = members
        self._conduct = conduct
        self._timing = timing
        self._state_bytes = state_bytes

    def is_worth(self, path: Suffix) -> bool:
        """Whether the contributions on the path are less to fetch than a whole state."""
        if len(path.certificates) <= self._timing.replay_limit:
            return True
        return len(path.certificates) <= MAX_REPLAYED and self._to_fetch(path) < self._state_bytes

    def why_never(self, path: Suffix | None, seconds: float) -> list[Note]:
        """What path grew to while a state came, in so many seconds, is not caught up with: so much faster our line would have to
        be. Nothing: it is."""
        if path is None or self.is_worth(path) or not self._state_bytes or seconds <= 0:
            return []
        rounds = sum(certificate.value.kind == "round" for certificate in path.certificates)
        had_bps, needed_bps = (
            8 * each / seconds for each in (self._state_bytes, self._to_fetch(path) / self._timing.exchange_share)
        )
        return [Note(LinkTooSlow(rounds, seconds, had_bps, needed_bps))]

    def _to_fetch(self, path: Suffix) -> int:
        """Bytes, about: what an entry says of its size is its author's word, so the median speaks for all."""
        sizes = [thing.size_bytes for certificate in path.certificates for thing in certificate.value.things]
        things = (thing for each in path.certificates for thing in each.value.things)
        missing = sum(not self._holdings.has(thing.name, part_of(thing)) for thing in things)
        return missing * int(median(sizes)) if sizes else 0

    def first_kept(self) -> tuple[int, int, int]:
        """The first round whose contributions are kept for those who are behind; of what nobody has certified; and of what passes by."""
        recent = self._chain.place.round - self._timing.keep_rounds + 1
        first, total = recent, 0
        for certificate in reversed(self._chain.certificates[-MAX_REPLAYED:]):
            total += sum(self._holdings.size_of(name) for name in certificate.value.blobs)
            if total > self._state_bytes:
                break
            first = min(first, certificate.value.round)
        return first, recent, self._chain.place.round - PASSING_ROUNDS + 1

    def want(self, certificates: Iterable[Certificate], now: float) -> list[FetchBlob]:
        """Fetches what is missing of them."""
        actions: list[FetchBlob] = []
        here = self._members.alive(now)
        for certificate in certificates:
            signers = [peer for peer, _ in certificate.signatures]
            for thing in certificate.value.things:
                sources = self._sources(thing.holder, signers, here)
                part = part_of(thing)
                actions += self._holdings.want(
                    thing.name, sources, round_number=certificate.value.round, now=now, part=part
                )
        return actions

    def is_lost(self, certificate: Certificate) -> bool:
        """Whether a contribution to it is not to be had."""
        tries = self._timing.blob_tries
        held = self._holdings
        things = certificate.value.things
        return any(held.is_refused(each.name, part_of(each)) or held.failures(each.name) >= tries for each in things)

    def is_here(self, certificate: Certificate) -> bool:
        return self._holdings.has_things(certificate.value.things)

    def _sources(self, author: PeerId, signers: Collection[PeerId], here: Collection[PeerId]) -> list[PeerId]:
        """Those here first, a dead one costs a dial; among them the author, then who signed that it holds the blob."""
        peers = {author, *signers, *here} - {self._me}
        peers = set(self._members.reachable(peers))
        ordered = sorted(peers, key=lambda peer: (peer not in here, peer != author, peer not in signers, peer))
        return self._conduct.best_first(ordered)
