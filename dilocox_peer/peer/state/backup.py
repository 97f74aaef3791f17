"""A copy of what another stage has agreed on, kept by a peer that does not train it: for when nobody of it is left.

    folder/chain.log                certificates from genesis on; older ones in chain.past beside it (chain_log.py)
    folder/checkpoints/anchor-N     the anchor state at one of their heads
    folder/../contributions         of all copied stages: contributions to the rounds since, at who follows closely

A copy counts only with its proof: every certificate verifies, and a later one names the state's digest. So whoever is
asked for it years later, or hands it on, can be believed no more than the quorums that signed it. `Annals` is the pure
part; `BackupStore` (backup_store.py) its disk. Two peers follow each stage closely (`followers`): they take the contributions to the rounds since as well,
so that no more than what they have not fetched yet is lost with the stage.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import ConfigError, ProtocolError
from dilocox_peer.invitation import all_loopback, parse_multiaddr
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.planning.plan import plan_bounds
from dilocox_peer.peer.rounds.chain import Chain, Place, Verifier, suffix_of
from dilocox_peer.peer.rounds.forks import Forks
from dilocox_peer.peer.rounds.genesis import genesis_of
from dilocox_peer.peer.rounds.past import Block, BlockStore, Certificates
from dilocox_peer.peer.rounds.patience import Patience
from dilocox_peer.peer.rounds.schedule import ends_run
from dilocox_peer.peer.rounds.unfounded import unfounded
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.wire.chain import Certificate
from dilocox_peer.wire.checkpoints import Checkpoint
from dilocox_peer.wire.declared import encode

MAX_PAGE_BYTES = (
    1 << 20
)  # of a chain, in one reply: five hundred certificates of eight peers; decoded it may take 64 times that
MAX_CHAIN_BYTES = 1 << 30
CHECKPOINTS: Final = "checkpoints"
COPY_ROUNDS = 16
COPY_SHARE = 0.1  # of the donor's time
FOLLOWERS = 2  # of each stage, where nobody keeps the run
NEAR_TRIES = 3  # looks; then far donors are asked too
NEWEST_TRIED = 3  # heads whose states a donor may still have on disk


def copy_folder(run_folder: Path, stage: int) -> Path:
    """Where a peer keeps its copy of a stage that it does not train."""
    return run_folder / "backup" / f"stage{stage}"


class Annals:
    """The chain of a stage as somebody outside knows it. Whatever it takes in is verified first."""

    def __init__(
        self,
        manifest: Manifest,
        stage: int,
        verify: Verifier,
        checkpoint: Checkpoint | None = None,
        patience: Patience | None = None,
        store: BlockStore | None = None,
    ) -> None:
        """checkpoint: the newest of the run's owner, verified, where one is known. patience: with view changes that no quorum
        signed; None: they count at once. store: where what is sealed lies; None: all stays in memory."""
        self.stage = stage
        self.patience = patience
        self._verify = verify
        self._max_peers = manifest.limits.max_peers
        self._plans = plan_bounds(manifest)
        self._chain = Chain(genesis_of(manifest, stage), store=store)
        self._forks = Forks(self._chain, max_back=manifest.rounds.checkpoint_every, checkpoint=checkpoint)

    @property
    def certificates(self) -> Sequence[Certificate]:
        return self._chain.certificates

    def as_it_is(self) -> Sequence[Certificate]:
        """All of them, whatever becomes of the chain."""
        return self._chain.as_it_is()

    def seal(self, blocks: Iterable[Block]) -> None:
        """What lies in these blocks of the store need not be in memory."""
        self._chain.seal(blocks)

    @property
    def place(self) -> Place:
        return self._chain.place

    @property
    def is_over(self) -> bool:
        """Whether the run's last round is certified."""
        return self._plans.total_steps is not None and ends_run(self._chain, self._chain.height, self._plans)

    def height_of(self, head: Digest) -> int | None:
        """None: it is not in this chain."""
        return self._chain.height_of(head)

    def surely(self, after: Digest | None = None) -> Sequence[Certificate]:
        """The certificates after this head, of the chain up to the first view change that no quorum has signed or followed, nor the owner
        vouched for: what follows may be a stranger's."""
        start = 0 if after is None else self._height_of(after)
        return self.certificates[start : max(start, self._sure_height)]

    def is_surely(self, head: Digest) -> bool:
        """Whether head is in that part of the chain."""
        height = self._chain.height_of(head)
        return height is not None and height <= self._sure_height

    @property
    def _sure_height(self) -> int:
        checkpoint = self._forks.checkpoint
        vouched = 0 if checkpoint is None else self._chain.height_of(checkpoint.head) or 0
        return next((height for height, _ in unfounded(self._chain, vouched)), self._chain.height)

    def hear(self, checkpoint: Checkpoint) -> None:
        """What the run's owner has signed, verified; the newest counts."""
        if checkpoint.is_newer(self._forks.checkpoint):
            self._forks.checkpoint = checkpoint

    def locator(self) -> list[Digest]:
        return self._chain.locator()

    def take(self, certificates: Sequence[Certificate], sender: PeerId | None = None, now: float = 0.0) -> None:
        """Goes on with these, from the head of ours that the first one follows, as far as they are believed by now (monotonic
        seconds). Raises ProtocolError: nothing is taken of certificates that do not verify, or of a branch that is not better
        than what is known (forks.py)."""
        self.check(certificates, sender)
        self.adopt(certificates, sender, now)

    def check(self, certificates: Sequence[Certificate], sender: PeerId | None = None) -> None:
        """Raises ProtocolError unless they verify. It takes some tenths of a millisecond for each, so that a thread may do it meanwhile: it only reads."""
        if not certificates:
            return
        height = self._height_before(certificates, sender)
        longest = self._chain.place_at(height).bounds(self._plans).longest_chain
        if longest is not None and height + len(certificates) > longest:
            raise ProtocolError(sender, f"a chain of more than {longest} certificates, which this run cannot have")
        place = self._chain.place_at(height)
        for certificate in certificates:
            if reason := place.why_not_certificate(certificate, self._verify, self._max_peers, self._plans):
                raise ProtocolError(sender, reason)
            place = place.then(certificate)

    def adopt(self, certificates: Sequence[Certificate], sender: PeerId | None = None, now: float = 0.0) -> None:
        """Goes on with what was checked. As `take`."""
        if not certificates:
            return
        height = self._height_before(certificates, sender)
        suffix = suffix_of(self._chain, height, certificates)
        if not suffix.certificates:
            return
        if reason := self._forks.why_not(suffix):
            raise ProtocolError(sender, reason)
        if self.patience is not None:
            believed = self.patience.settled(self._chain, suffix, self._forks.checkpoint, now)
            if believed is None:
                return
            suffix = believed
        if not self._forks.is_better(suffix, None):
            raise ProtocolError(
                sender, f"a branch that parts at round {self._chain.place_at(suffix.ancestor).round} and counts less"
            )
        self._forks.left(suffix.ancestor, self._chain.truncate(suffix.ancestor))
        for certificate in suffix.certificates:
            self._chain.append(certificate)

    def _height_before(self, certificates: Sequence[Certificate], sender: PeerId | None) -> int:
        height = self._chain.height_of(certificates[0].parent)
        if height is None:
            raise ProtocolError(sender, "certificates that follow no head of the chain asked about")
        return height

    def newest_proven(self, most: int = NEWEST_TRIED) -> list[tuple[Digest, bytes]]:
        """(head, digest of the state there) of the newest heads whose state a later certificate names, newest first."""
        return list(itertools.islice(self._proven(), most))

    def _proven(self) -> Iterator[tuple[Digest, bytes]]:
        certificates = self.certificates
        for height in range(len(certificates) - 1, 0, -1):
            if digest := certificates[height].value.state_digest:
                yield certificates[height].parent, digest

    def proven_at(self, round_number: int) -> tuple[Digest, bytes] | None:
        """(head, digest of the state there) of the newest head of that round whose state a later certificate names."""
        for head, digest in self._proven():
            found = self._chain.place_at(self._height_of(head)).round
            if found <= round_number:  # further back there are earlier ones alone
                return (head, digest) if found == round_number else None
        return None

    def digest_at(self, head: Digest) -> bytes:
        """Digest of the state at head, b"" if no certificate names it."""
        height = self._chain.height_of(head)
        if height is None or height >= self._chain.height:
            return b""
        return self.certificates[height].value.state_digest

    def round_at(self, head: Digest) -> int | None:
        """The round that ended at head; None if it is not in this chain."""
        height = self._chain.height_of(head)
        return None if height is None else self._chain.place_at(height).round

    def since(self, head: Digest) -> Sequence[Certificate]:
        """The certificates after head, which is in the chain."""
        return self.certificates[self._height_of(head) :]

    def num_since(self, head: Digest) -> int:
        """How many they are."""
        return self._chain.height - self._height_of(head)

    def after(self, head: Digest) -> Iterator[Certificate]:
        """The same as `since`, one by one: who ends early reads no more of them."""
        certificates = self.certificates
        return (certificates[number] for number in range(self._height_of(head), len(certificates)))

    def give_up_after(self, head: Digest) -> None:
        """The chain ends at head, which is in it, until somebody shows what counts more."""
        height = self._height_of(head)
        self._forks.left(height, self._chain.truncate(height))

    def holds(self, head: Digest) -> bool:
        """Whether head is in the chain."""
        return self._chain.height_of(head) is not None

    def voters_at(self, head: Digest) -> tuple[PeerId, ...]:
        """Those whose votes certify what follows head, which is in the chain."""
        return tuple(self._chain.place_at(self._height_of(head)).voters)

    def signers_of(self, head: Digest) -> str:
        """How many of how many peers signed the certificate at head, which is in the chain; for people."""
        height = self._chain.height_of(head)
        assert height, f"head {head.hex()[:8]} is not certified in this chain"
        certificate, before = self.certificates[height - 1], self._chain.place_at(height - 1)
        roster = certificate.value.roster if certificate.value.kind == "epoch" else before.roster
        return f"{len(certificate.signatures)} of {len(roster)} peers"

    def up_to(self, head: Digest) -> tuple[Certificate, ...]:
        """The chain that ends at head, which is in it."""
        return tuple(self.certificates[: self._height_of(head)])

    def _height_of(self, head: Digest) -> int:
        height = self._chain.height_of(head)
        assert height is not None, f"head {head.hex()[:8]} is not in this chain"
        return height


def page_after(certificates: Sequence[Certificate], heads: Collection[Digest]) -> Sequence[Certificate]:
    """What follows the first of these heads that is in the chain, else all; at most a page."""
    if isinstance(certificates, Certificates):
        height_of: Callable[[Digest], int | None] = certificates.height_of
    else:
        height_of = {certificate.head: height for height, certificate in enumerate(certificates, 1)}.get
    start = next((height for head in heads if (height := height_of(head))), 0)
    page, size_bytes = list[Certificate](), 0
    for number in range(start, len(certificates)):
        page.append(certificates[number])
        size_bytes += len(encode(page[-1]))
        if size_bytes >= MAX_PAGE_BYTES // 4:
            break
    return page


def stages_to_keep(own: int, replicas: Mapping[int, int], kept: Collection[int], count: int, me: PeerId) -> list[int]:
    """Which `count` stages this peer keeps copies of: those it has begun with, then those with the fewest replicas, of
    equals not all peers the same. replicas: of the stages that somebody holds now."""

    def need(stage: int) -> tuple[bool, int, bytes]:
        return stage not in kept, replicas.get(stage, 0), sha256(me.encode(), stage.to_bytes(4, "big"))

    known = {stage for stage, number in replicas.items() if number} | set(kept)
    return sorted(known - {own}, key=need)[:count]


def followers(stage: int, others: Collection[PeerId]) -> list[PeerId]:
    """Those that take the contributions to a stage's rounds as they come. others: the peers of the other stages; all come to the same two."""
    return sorted(others, key=lambda peer: sha256(b"follows", stage.to_bytes(4, "big"), peer.encode()))[:FOLLOWERS]


def reached_with(certificates: Sequence[Certificate], held: Shelf) -> tuple[Certificate, ...]:
    """As many of them, from the first on, as the contributions to are held."""
    reached = itertools.takewhile(lambda each: all(name in held for name in each.value.blobs), certificates)
    return tuple(reached)


def is_due(newest: int, kept: int | None) -> bool:
    """Whether a stage's state is to be copied again. newest, kept: rounds, that it has certified and of our copy."""
    return kept is None or newest >= kept + COPY_ROUNDS


def rest_s(copied_s: float, replicas: Mapping[int, int], own: int, stage: int, count: int) -> float:
    """Seconds to leave between copies of a stage that take copied_s, so that all who copy from one of its peers take no more
    than COPY_SHARE of its time. replicas: of all stages but our own; count: copies that each peer keeps."""
    others = 1 + sum(number for other, number in replicas.items() if other not in (own, stage))
    guardians = max(1.0, others * count / max(1, len(replicas)))
    return copied_s / COPY_SHARE * max(1.0, guardians / max(1, replicas[stage]))


def hosts_of(addresses: Iterable[str]) -> set[str]:
    """Where these multiaddresses are; not of relays, nor of every computer's way to itself, nor of what cannot be read."""
    found = set()
    for text in addresses:
        with suppress(ConfigError):
            address = parse_multiaddr(text, "lease")
            if not address.is_relayed and not all_loopback([text]):
                found.add(address.host)
    return found


def worth_asking(donors: Sequence[Lease], addresses: Iterable[str], site: str, *, in_vain: int) -> list[Lease]:
    """Those whose bytes do not cross our line, as far as leases tell: of our site, or announced at a host where we are announced, by which
    one router or one computer is known. Where there is none, or near ones were asked in vain so often, the others behind them, as they come.
    addresses, site: ours. in_vain: looks in a row at which a copy was due and nobody gave it: a state that has just gone by is there again
    at the next, and over a slow line takes minutes."""
    own = hosts_of(addresses)
    near = [each for each in donors if (site and each.site == site) or not own.isdisjoint(hosts_of(each.addresses))]
    if near and in_vain < NEAR_TRIES:
        return near
    return [*near, *(each for each in donors if each not in near)]


@dataclass(frozen=True, slots=True)
class Backup:
    """A state, and the chain that ends at its head. since: certificates that follow, the contributions to which are here too."""

    certificates: tuple[Certificate, ...]
    state: AnchorState
    since: tuple[Certificate, ...] = ()

    @property
    def chain(self) -> tuple[Certificate, ...]:
        """All of it."""
        return (*self.certificates, *self.since)

    @property
    def round(self) -> int:
        """That the contributions lead to."""
        return self.chain[-1].value.round
