"""A live run as somebody reads it who takes no part in it: what its stages have agreed on, and their states.

What counts is what the certificates say by the rule that peers follow (rounds/forks.py): the owner's newest checkpoint first,
then the votes, and nothing that a minority wrote a moment ago (rounds/patience.py). What a donor says of a state decides
nothing: its head and its digest are known before it is asked for, except at a stage's tip, which no certificate names yet;
there most of the roster's peers must name the same digest.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import PeerUnavailable, ProtocolError
from dilocox_peer.events import Listener, MessageRefused
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.network.transport import Transport
from dilocox_peer.peer.rounds.patience import Patience
from dilocox_peer.peer.rounds.refusals import Refusals
from dilocox_peer.peer.state.backup import Annals
from dilocox_peer.peer.state.backup_exchange import fetch_chain
from dilocox_peer.peer.state.statesync import Agreed, fetch_digest, fetch_state
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.signing import verify
from dilocox_peer.types import Digest, PeerId

MEMBERS_ASKED, OTHERS_ASKED = 3, 2  # at a look
DIRECTORY_EVERY_S = 5.0
CONNECT_S, DIGEST_S, CHAIN_S, STATE_S = 5.0, 5.0, 60.0, 3600.0
PATIENCE_S = 30.0  # with view changes that a minority signed: longer than a roster waits for its quorum
ROUNDS = 8  # the newest that a common one is looked for among


class Survey:
    """One stage. `look`, then `states` or `tip`."""

    def __init__(
        self,
        manifest: Manifest,
        stage: int,
        *,
        transport: Transport,
        directory: Directory,
        listener: Listener,
        rng: random.Random,
    ) -> None:
        """The manifest has to be fetched from directory before. rng: of equals, the order in which peers are asked."""
        self.stage = stage
        self.annals = Annals(manifest, stage, verify, patience=Patience(PATIENCE_S))
        self._layout = layout_of(manifest, stage)
        self._genesis = manifest.genesis(stage)
        self._transport = transport
        self._directory = directory
        self._listener = listener
        self._rng = rng
        self._refusals = Refusals()
        self._looked_at = float("-inf")
        self._reached: list[PeerId] = []
        self._leases: Sequence[Lease] = ()
        self._failed: dict[PeerId, int] = {}  # times; who fails is asked after the others

    @property
    def is_served(self) -> bool:
        """Whether any peer of the stage was reached."""
        return bool(self._reached)

    @property
    def leases(self) -> Sequence[Lease]:
        """As the directory had them when it was last read."""
        return self._leases

    @property
    def reached(self) -> Collection[PeerId]:
        """Those of them that there was a connection with then."""
        return self._reached

    async def look(self) -> None:
        """Brings the chain up to what a few of the stage's peers have. Raises RunUnreachable."""
        now = asyncio.get_running_loop().time()
        if not self._reached or now - self._looked_at >= DIRECTORY_EVERY_S:
            await self._find()
            self._looked_at = now
        for peer in to_ask(self._by_trust(), self.annals.place.roster):
            try:
                await fetch_chain(self._transport, peer, self.annals, CHAIN_S)
            except PeerUnavailable:
                self._failed[peer] = self._failed.get(peer, 0) + 1
            except ProtocolError as error:
                self._failed[peer] = self._failed.get(peer, 0) + 1
                if self._refusals.is_due(peer, asyncio.get_running_loop().time()):
                    self._listener(MessageRefused(peer, error.reason))

    def states(self) -> list[Agreed]:
        """The newest states that certificates name, newest first, one for each round."""
        found: dict[int, Agreed] = {}
        for head, digest in self.annals.newest_proven(ROUNDS):
            round_number = self.annals.round_at(head)
            assert round_number is not None, "a head of this chain"
            if round_number > 0:
                found.setdefault(round_number, Agreed(round_number, head, digest))
        return list(found.values())

    async def tip(self) -> Agreed | None:
        """The state at the tip, when more than half of the voters that answer name its digest."""
        place = self.annals.place
        voters = [peer for peer in self._reached if peer in place.voters]
        digest = most_named(await asyncio.gather(*(self._digest(peer, place.head) for peer in voters)))
        return Agreed(place.round, place.head, digest) if digest else None

    async def fetch(self, agreed: Agreed) -> AnchorState | None:
        """From all donors that have it, members first; None if nobody has."""
        return await fetch_state(
            self._transport, self._by_trust(), agreed, layout=self._layout, timeout_s=STATE_S, listener=self._listener
        )

    async def fetch_first(self, digest: bytes) -> AnchorState | None:
        """The state before the first round, which has this digest, while some peer of the stage still holds it."""
        return await self.fetch(Agreed(0, self._genesis, digest))

    async def _find(self) -> None:
        leases = await self._directory.peers(self.stage)
        if (word := await self._directory.word(self.stage)) is not None:
            self.annals.hear(word[0])

        async def reach(number: int) -> PeerId | None:
            with suppress(PeerUnavailable):
                await self._transport.connect(leases[number].peer, leases[number].addresses, CONNECT_S)
                return leases[number].peer
            return None

        reached = await asyncio.gather(*map(reach, range(len(leases))))
        self._reached, self._leases = [peer for peer in reached if peer is not None], leases
        self._failed = {peer: times for peer, times in self._failed.items() if peer in self._reached}

    def _by_trust(self) -> Sequence[PeerId]:
        return by_trust(self._reached, self.annals.place.roster, self._failed, self._rng)

    async def _digest(self, peer: PeerId, head: Digest) -> bytes:
        with suppress(PeerUnavailable, ProtocolError):
            return await fetch_digest(self._transport, peer, head, DIGEST_S)
        return b""


def by_trust(
    peers: Sequence[PeerId], roster: Collection[PeerId], failed: Mapping[PeerId, int], rng: random.Random
) -> Sequence[PeerId]:
    """The roster's before others, those that failed least first, else in any order. Pure."""
    shuffled = rng.sample(peers, len(peers))
    return sorted(shuffled, key=lambda peer: (peer not in roster, failed.get(peer, 0)))


def to_ask(trusted: Sequence[PeerId], roster: Collection[PeerId]) -> Sequence[PeerId]:
    """Whom to ask for their chains at one look, of peers in the order of trust: a few of the roster, and always room for
    others, as all of the roster may be gone or of one mind. Pure."""
    members = [peer for peer in trusted if peer in roster][:MEMBERS_ASKED]
    others = [peer for peer in trusted if peer not in roster]
    return [*members, *others[: MEMBERS_ASKED + OTHERS_ASKED - len(members)]]


def most_named(digests: Iterable[bytes]) -> bytes:
    """The digest that more than half of those name that name one (b"": none), b"" without such a one. Pure."""
    named = Counter(digest for digest in digests if digest)
    digest, count = max(named.items(), key=lambda each: each[1], default=(b"", 0))
    return digest if 2 * count > named.total() else b""


def surveys(
    manifest: Manifest, *, transport: Transport, directory: Directory, listener: Listener
) -> tuple[Survey, ...]:
    """Of all stages, the first one first."""
    rng = random.Random()
    return tuple(
        Survey(manifest, stage, transport=transport, directory=directory, listener=listener, rng=rng)
        for stage in range(manifest.stages.count)
    )


async def look_at_all(found: Sequence[Survey]) -> None:
    """A look at every stage. Raises RunUnreachable once all of them have ended: a look that goes on unseen would meet the next
    one at its chain."""
    looks = await asyncio.gather(*(survey.look() for survey in found), return_exceptions=True)
    for failure in looks:
        if isinstance(failure, BaseException):
            raise failure


def newest_common(found: Sequence[Survey]) -> tuple[Agreed, ...] | None:
    """The states of the newest round that certificates of every stage name; None if there is none."""
    by_round = [{agreed.round: agreed for agreed in survey.states()} for survey in found]
    common = set.intersection(*(set(each) for each in by_round))
    return tuple(each[max(common)] for each in by_round) if common else None


async def common_tip(found: Sequence[Survey]) -> tuple[Agreed, ...] | None:
    """The states at the tips, if all stages are at one round and their voters agree on them."""
    tips = await asyncio.gather(*(survey.tip() for survey in found))
    agreed = tuple(tip for tip in tips if tip is not None)
    rounds = {tip.round for tip in agreed}
    return agreed if len(agreed) == len(tips) and len(rounds) == 1 and min(rounds) > 0 else None


async def fetch_all(found: Sequence[Survey], wanted: Sequence[Agreed]) -> tuple[AnchorState, ...] | None:
    """The states of all stages; None if one of them is not to be had now."""
    states = await asyncio.gather(*(survey.fetch(agreed) for survey, agreed in zip(found, wanted, strict=True)))
    whole = tuple(state for state in states if state is not None)
    return whole if len(whole) == len(states) else None
