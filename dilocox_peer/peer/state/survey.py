"""A live run as somebody reads it who takes no part in it: what its stages have agreed on, and their states.

What counts is what the certificates say by the rule that peers follow (rounds/forks.py): the owner's newest checkpoint first,
then the votes, and nothing that a minority wrote a moment ago, or while a quorum answers from elsewhere (rounds/patience.py). What a donor says of a state decides
nothing: its head and its digest are known before it is asked for, except at a stage's tip, which no certificate names yet;
there most of the roster's peers must name the same digest. Where all of them have gone home a keeper names it, if it is one that
the run's link names: whoever gave the link could have given another.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease
from dilocox_peer.dht.turns import AskedInTurn
from dilocox_peer.errors import PeerUnavailable, ProtocolError
from dilocox_peer.events import Listener, MessageRefused
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.network.transport import PeerRefusing, Transport
from dilocox_peer.peer.rounds.patience import Patience
from dilocox_peer.peer.rounds.refusals import Refusals
from dilocox_peer.peer.rounds.whereabouts import Whereabouts
from dilocox_peer.peer.state.backup import Annals
from dilocox_peer.peer.state.backup_exchange import fetch_chain, fetch_summary, trusted_first
from dilocox_peer.peer.state.statesync import Agreed, fetch_digest, fetch_state
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.signing import verify
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import Digest, PeerId

MEMBERS_ASKED, OTHERS_ASKED = 3, 2  # at a look
DECISIVE_ASKED = 3  # and of those whose silence would decide
STRANGERS_REACHED = 64  # at a look, of those that are in no roster here and were not reached at the last one
ASK_ALL_S = 1.0  # between two looks at so many; those between ask one
DIRECTORY_EVERY_S = 5.0
SELDOM_S = 20.0  # between two looks at who keeps runs, and at the owner's word: they change in minutes, and a look asks every node
CONNECT_S, DIGEST_S, CHAIN_S, STATE_S = 5.0, 5.0, 60.0, 3600.0
LEASES_S = 45.0  # of a start, in which all that are there have renewed theirs
PATIENCE_S = 30.0  # with view changes that a minority signed: longer than a roster waits for its quorum
GRACE_S = 5.0  # in which others tell what they have beyond the chain of one that was read
AGAIN_S = 1.0  # for it, with one that is not of the roster and failed before: it asks for nothing but our time
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
        annals: Annals | None = None,
        patience_s: float = PATIENCE_S,
        find_every_s: float | None = None,
    ) -> None:
        """The manifest has to be fetched from directory before. rng: of equals, the order in which peers are asked. annals: to go on
        with, of somebody who looks all the time; None: the chain is read from its beginning. patience_s: with view changes of a
        minority. find_every_s: between two looks at the directory."""
        self.stage = stage
        self._looks_on = annals is not None
        self.annals = annals or Annals(manifest, stage, verify)
        self.annals.patience = Patience(
            patience_s, are_away=self._are_away, are_gone=self._are_gone, elsewhere=self._elsewhere
        )
        self._whereabouts = Whereabouts()
        self._asked_of: dict[PeerId, float] = {}  # when each was asked last
        self._doubted: tuple[Collection[PeerId], float] = ((), float("-inf"))  # whose silence would decide, as of when
        self._find_every_s = find_every_s
        self._patience_s = patience_s
        self._began_at = float("inf")
        self._finding: asyncio.Task[None] | None = None
        self._heard_at: dict[PeerId, float] = {}
        self._listed: dict[
            PeerId, bool
        ] = {}  # whether each that has a lease may be there: it has not left, and does not refuse
        self._layout = layout_of(manifest, stage)
        self._genesis = manifest.genesis(stage)
        self._transport = transport
        self._directory = directory
        self._listener = listener
        self._rng = rng
        self._turns = AskedInTurn(rng)
        self._refusals = Refusals()
        self._looked_at = self._asked_at = float("-inf")
        self._reached: list[PeerId] = []
        self._leases: Sequence[Lease] = ()
        self.has_looked = False  # at the directory
        # By what it told last: no peer has the stage, and whoever keeps runs says that it has nothing of it
        self.is_unheld = False
        self._keepers: dict[PeerId, int] = {}  # those reached, and the rounds of the states they have
        self._listed_keepers: Sequence[Lease] = ()
        self._found_at = float("-inf")  # when they were looked up, and the owner's word
        self._failed: dict[PeerId, int] = {}  # times; who fails is asked after the others

    @property
    def is_served(self) -> bool:
        """Whether any peer of the stage was reached, or somebody who keeps it."""
        return bool(self._reached or self._keepers)

    @property
    def members_here(self) -> int:
        """Peers of the stage that were reached."""
        return len(self._reached)

    @property
    def held(self) -> Agreed | None:
        """The newest state that a keeper says it has and that a certificate names: where all peers are gone, others are not to be had."""
        for number in sorted(self._keepers.values(), reverse=True):
            if number > 0 and (found := self.annals.proven_at(number)) is not None:
                return Agreed(number, *found)
        return None

    def is_left(self, head: Digest) -> bool:
        """Whether all voters of the chain at head are gone or were not heard for long; to who looks all the time."""
        voters, now = self.annals.voters_at(head), asyncio.get_running_loop().time()
        return self._are_gone(voters, now) or self._are_away(voters, now)

    def _are_away(self, voters: Collection[PeerId], now: float) -> bool:
        if not self._looks_on or now - self._began_at < self._patience_s:
            return False
        return all(now - self._heard_at.get(peer, float("-inf")) >= self._patience_s for peer in voters)

    def _are_gone(self, voters: Collection[PeerId], now: float) -> bool:
        """A voter without a lease counts once all that are there have had time to write theirs."""
        may_be_there = now - self._began_at < LEASES_S
        return self._looks_on and not any(self._listed.get(peer, may_be_there) for peer in voters)

    def _elsewhere(self, voters: Sequence[PeerId], heads: Collection[Digest]) -> float:
        self._doubted = voters, self._asked_at
        return self._whereabouts.elsewhere(voters, heads)

    def _decisive(self, now: float) -> Sequence[PeerId]:
        """Voters to ask although others are to be trusted more, as a branch waits for them to be silent: those not asked for longest."""
        voters, at = self._doubted
        if now - at > self._patience_s:
            return []
        here = [peer for peer in self._reached if peer in voters]
        return sorted(here, key=lambda peer: self._asked_of.get(peer, float("-inf")))[:DECISIVE_ASKED]

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
        self._began_at = min(self._began_at, now)
        find_every_s = DIRECTORY_EVERY_S if self._find_every_s is None else self._find_every_s
        if (not self._reached and not self._looks_on) or now - self._looked_at >= find_every_s:
            await self._find_soon()
            self._looked_at = now
        asked = list(dict.fromkeys([*to_ask(self._by_trust(), self.annals.place.roster), *self._decisive(now)]))
        if (
            self._looks_on and now - self._asked_at < ASK_ALL_S
        ):  # looks come soon after one another where rounds are short
            asked = asked[:1]
        else:
            self._asked_at = now
        within_s = CHAIN_S
        for peer in asked:
            self._asked_of[peer] = now = asyncio.get_running_loop().time()
            self._whereabouts.asked(peer, now)
            try:
                is_doubted = peer in self._failed and peer not in self.annals.place.roster
                head = await fetch_chain(
                    self._transport, peer, self.annals, AGAIN_S if is_doubted and within_s < CHAIN_S else within_s
                )
                self._whereabouts.said(peer, head)
                within_s = GRACE_S
                self._heard_at[peer] = asyncio.get_running_loop().time()
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
        if not digest and not voters:
            keepers = [peer for peer in self._keepers if peer in self._transport.named]
            digest = most_named(await asyncio.gather(*(self._digest(peer, place.head) for peer in keepers)))
        return Agreed(place.round, place.head, digest) if digest else None

    @property
    def donors(self) -> Sequence[PeerId]:
        """Those reached, members first."""
        return self._by_trust()

    async def fetch(self, agreed: Agreed, shelf: Shelf | None = None) -> AnchorState | None:
        """From all donors that have it, members first; None if nobody has. shelf: where it is put together, None: in memory.
        Raises OSError when there is no room."""
        return await fetch_state(
            self._transport, self._by_trust(), agreed, layout=self._layout, timeout_s=STATE_S, listener=self._listener,
            shelf=shelf,
        )  # fmt: skip

    async def fetch_first(self, digest: bytes) -> AnchorState | None:
        """The state before the first round, which has this digest, while some peer of the stage still holds it."""
        return await self.fetch(Agreed(0, self._genesis, digest))

    def close(self) -> None:
        """Ends a look at the directory that is under way."""
        if self._finding is not None:
            self._finding.cancel()

    async def _find_soon(self) -> None:
        """One that looks all the time does not wait for leases of peers that have gone. Raises RunUnreachable."""
        if not self._looks_on:
            await self._find()
            return
        if self._finding is not None and not self._finding.done():
            return
        found, self._finding = self._finding, None
        if found is not None:
            found.result()
        self._finding = asyncio.create_task(self._find(), name=f"peers of stage {self.stage}")
        if not self._reached:
            await asyncio.wait({self._finding}, timeout=CONNECT_S + DIGEST_S)

    async def _find(self) -> None:
        leases, _ = await asyncio.gather(self._directory.leases(self.stage), self._find_seldom())
        listed = {lease.peer: not lease.has_left for lease in leases}
        keepers = trusted_first(self._listed_keepers, self._transport, self._rng)
        silent = {lease.peer for lease in keepers}

        async def reach(lease: Lease) -> PeerId | None:
            try:
                await self._transport.connect(lease.peer, lease.addresses, CONNECT_S)
            except PeerUnavailable as error:
                listed[lease.peer] = not isinstance(error, PeerRefusing)
                return None
            return lease.peer

        async def ask(lease: Lease) -> tuple[PeerId, int] | None:
            with suppress(PeerUnavailable, ProtocolError):
                await self._transport.connect(lease.peer, lease.addresses, CONNECT_S)
                summary = await fetch_summary(self._transport, lease.peer, self.stage, CONNECT_S)
                silent.discard(lease.peer)
                return None if summary is None else (lease.peer, summary.round)
            return None

        reached, kept = await asyncio.gather(
            asyncio.gather(*map(reach, self._to_reach([lease for lease in leases if not lease.has_left]))),
            asyncio.gather(*map(ask, keepers)),
        )
        self._reached = [peer for peer in reached if peer is not None]
        self._listed = listed
        self._leases = [lease for lease in leases if not lease.has_left]
        self.has_looked = True
        self._keepers = dict(each for each in kept if each is not None)
        self.is_unheld = not (self._leases or self._keepers or silent)
        known = {*self._reached, *self._keepers}
        self._failed = {peer: times for peer, times in self._failed.items() if peer in known}
        self._asked_of = {peer: at for peer, at in self._asked_of.items() if peer in known}
        remembered = {*known, *self.annals.place.voters}
        self._heard_at = {peer: at for peer, at in self._heard_at.items() if peer in remembered}
        self._note_who_is_there(remembered)

    async def _find_seldom(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._looks_on and now - self._found_at < SELDOM_S:
            return
        keepers, word = await asyncio.gather(self._directory.keepers(), self._directory.word(self.stage))
        self._listed_keepers, self._found_at = keepers, now
        if word is not None:
            self.annals.hear(word[0])

    def _note_who_is_there(self, remembered: Collection[PeerId]) -> None:
        """Voters that were not reached are asked no more: that is as if they did not answer."""
        here, now = {*self._reached, *self._keepers}, asyncio.get_running_loop().time()
        for peer in self._reached:
            self._whereabouts.met(peer)
        for peer in [*self._whereabouts.known]:
            if peer not in remembered:
                self._whereabouts.forget(peer)
            elif peer not in here:
                self._whereabouts.asked(peer, now)

    def _to_reach(self, leases: Sequence[Lease]) -> list[Lease]:
        """Those that were reached before or are in the roster, and some of the others at each look: they may be nothing but leases."""
        known = {*self._reached, *self.annals.place.roster}
        others = [lease for lease in leases if lease.peer not in known]
        return [
            *(lease for lease in leases if lease.peer in known),
            *self._turns.take(others, self._transport, STRANGERS_REACHED),
        ]

    def _by_trust(self) -> Sequence[PeerId]:
        peers = list(dict.fromkeys([*self._reached, *self._keepers]))
        return by_trust(peers, self.annals.place.roster, self._failed, self._rng)

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


async def look_at_all(found: Sequence[Survey], *, at_once: int | None = None) -> None:
    """A look at every stage, so many at once; None: all. Raises RunUnreachable once all of them have ended: a look that goes on unseen
    would meet the next one at its chain."""
    slots = asyncio.Semaphore(at_once or max(1, len(found)))

    async def look(survey: Survey) -> None:
        async with slots:
            await survey.look()

    looks = await asyncio.gather(*map(look, found), return_exceptions=True)
    for failure in looks:
        if isinstance(failure, BaseException):
            raise failure


def newest_common(found: Sequence[Survey]) -> tuple[Agreed, ...] | None:
    """The states of the newest round that certificates of every stage name; None if there is none."""
    by_round = [{agreed.round: agreed for agreed in survey.states()} for survey in found]
    common = set.intersection(*(set(each) for each in by_round))
    return tuple(each[max(common)] for each in by_round) if common else None


def held_common(found: Sequence[Survey]) -> tuple[Agreed, ...] | None:
    """The states that somebody keeps of one round of all stages, and certificates name; None if there are none."""
    held = [survey.held for survey in found]
    agreed = tuple(each for each in held if each is not None)
    return agreed if len(agreed) == len(held) and len({each.round for each in agreed}) == 1 else None


async def common_tip(found: Sequence[Survey]) -> tuple[Agreed, ...] | None:
    """The states at the tips, if all stages are at one round and their voters agree on them."""
    tips = await asyncio.gather(*(survey.tip() for survey in found))
    agreed = tuple(tip for tip in tips if tip is not None)
    rounds = {tip.round for tip in agreed}
    return agreed if len(agreed) == len(tips) and len(rounds) == 1 and min(rounds) > 0 else None


async def fetch_newest(found: Sequence[Survey], wanted: Sequence[Agreed]) -> tuple[AnchorState, ...] | None:
    """The states of all stages; where they are not to be had, those that somebody keeps, if there are any."""
    states = await fetch_all(found, wanted)
    if states is None and (held := held_common(found)) is not None and held != tuple(wanted):
        states = await fetch_all(found, held)
    return states


async def fetch_all(found: Sequence[Survey], wanted: Sequence[Agreed]) -> tuple[AnchorState, ...] | None:
    """The states of all stages; None if one of them is not to be had now."""
    states = await asyncio.gather(*(survey.fetch(agreed) for survey, agreed in zip(found, wanted, strict=True)))
    whole = tuple(state for state in states if state is not None)
    return whole if len(whole) == len(states) else None
