"""A run's directory: who serves which stage, the manifest, and hints where the chains are, on hivemind's DHTNode.

For finding one another, at the start and now and then; nothing here says who is alive (heartbeats do) or what was agreed
(certificates do). Every peer is a node of it, bootstrap servers too, and every node refuses what validators.py refuses;
what strangers send passes entry.py before hivemind reads it.
hivemind's answer caches are off: they are not merged with what is stored, so a cached dictionary can hide newer leases.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self

from dilocox_peer.admission import Gate, Revocations, Right
from dilocox_peer.dht.bounds import bound_node
from dilocox_peer.dht.entry import Door, GuardedP2P
from dilocox_peer.dht.named import NamedPeers, Records, StoreAnswers, Stored, merged
from dilocox_peer.dht.nearest import remember_nearest
from dilocox_peer.dht.records import (
    BUCKETS,
    LEASE_TTL_S,
    MAX_TTL_S,
    Lease,
    bucket_of,
    decode_word,
    directive_key,
    encode_word,
    lease_key,
    manifest_key,
    revocations_key,
    word_key,
)
from dilocox_peer.dht.validators import RecordValidator
from dilocox_peer.errors import ManifestMismatch, PeerUnavailable, RunUnreachable
from dilocox_peer.invitation import parse_multiaddr, parse_multiaddrs
from dilocox_peer.manifest import Manifest
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId, RunId
from dilocox_peer.wire.checkpoints import Checkpoint
from dilocox_peer.wire.directives import Directive, newest_first, read_directive
from dilocox_peer.wire.records import KEEPERS, MAX_ADDRESSES

if TYPE_CHECKING:
    from hivemind.dht import DHTNode

_RPC_TIMEOUT_S = 3.0  # one question to one node
_WALK_PART = 0.6  # of the time for a question; what came until then is the answer
_RETRY_LATER = "; try again later"

# What the store this task is in has come to at other nodes, and what the walk it is in was told by each; see _keep_answers.
_stored: ContextVar[Stored | None] = ContextVar("stored", default=None)
_heard: ContextVar[list[tuple[Any, Any]] | None] = ContextVar("heard", default=None)


class Network(Protocol):
    """What the directory needs of network.transport.Transport."""

    @property
    def p2p(self) -> Any: ...
    @property
    def initial_peers(self) -> tuple[str, ...]: ...
    @property
    def named(self) -> frozenset[PeerId]: ...
    @property
    def is_down(self) -> bool: ...
    @property
    def doors(self) -> Door: ...
    async def connect(self, peer: PeerId, addresses: Sequence[str], timeout_s: float = ...) -> None: ...


class Directory:
    """See the module. `timeout_s` of every call is for the whole of it; calls raise RunUnreachable when it is over. node:
    hivemind's, through transport."""

    def __init__(
        self,
        *,
        node: "DHTNode",
        transport: "Network",
        run_id: RunId,
        key: SigningKey,
        initial_peers: tuple[str, ...],
        validator: RecordValidator,
        clock: Callable[[], float],
        forget_nearest: Callable[[Any], None] = lambda _key: None,
    ) -> None:
        self.validator = validator
        self._forget_nearest = forget_nearest
        self._gate: Gate | None = None
        self.node = node
        self.transport = transport
        self._run_id = run_id
        self.key = key
        self._initial_peers = initial_peers
        self._clock = clock
        self._announced: Lease | None = None
        self._named = NamedPeers(node, lambda: transport.named, validator, clock)
        self.banned: Collection[PeerId] = ()
        """Peers that the run's owner has banned: their leases are read no more."""

    @classmethod
    async def create(
        cls,
        transport: "Network",
        run_id: RunId,
        key: SigningKey,
        *,
        initial_peers: Sequence[str] | None = None,
        is_alone: bool = False,
        clock: Callable[[], float] = time.time,
        timeout_s: float = 15.0,
    ) -> "Directory":
        """A node of the run's directory, known to initial_peers (the transport's, if not given). Raises RunUnreachable.

        is_alone: none of them is there now: the node is the first of a directory, until `greet_initial_peers` finds one.
        clock: wall clock; hivemind's own storage uses time.time whatever is given here.
        """
        from hivemind.dht import DHTNode
        from hivemind.dht.routing import DHTID

        known = transport.initial_peers if initial_peers is None else parse_multiaddrs(initial_peers, "peer")
        known = tuple(text for text in known if not text.endswith(f"/p2p/{key.peer_id}"))
        validator = RecordValidator(run_id, key, clock)
        guarded = GuardedP2P(transport.p2p, validator, door=transport.doors)
        try:
            async with asyncio.timeout(timeout_s):
                node = await DHTNode.create(
                    p2p=guarded,  # type: ignore[arg-type, unused-ignore]
                    # Not random: a bootstrap server that restarts is the same node again. entry.py knows others by it.
                    node_id=DHTID.generate(source=key.public_key),
                    initial_peers=[] if is_alone else list(known),
                    record_validator=validator,  # type: ignore[arg-type, unused-ignore]
                    backoff_rate=1.0,  # a node that failed is left alone for 5 s; doubling each time bans a restarted one for hours
                    strict=False,  # strict refuses a clock 3 s off, and peers that cannot be dialled back
                    wait_timeout=_RPC_TIMEOUT_S,
                    cache_locally=False,
                    cache_nearest=0,
                    cache_on_store=False,
                    cache_size=64,  # others can still ask us to cache
                )
        except TimeoutError:
            await guarded.withdraw()
            raise RunUnreachable(
                f"the directory of the run did not answer within {timeout_s:g} s{_RETRY_LATER}"
            ) from None
        except RuntimeError:  # hivemind: "none of the initial_peers responded to a ping"
            await guarded.withdraw()
            peers = ", ".join(known[:3])
            raise RunUnreachable(
                f"{peers} can be reached, but no directory of a run answers there: ask for a new link"
            ) from None
        bound_node(node, str(key.peer_id))
        _keep_answers(node)
        forget_nearest = remember_nearest(node)
        return cls(
            node=node,
            transport=transport,
            run_id=run_id,
            key=key,
            initial_peers=known,
            clock=clock,
            validator=validator,
            forget_nearest=forget_nearest,
        )

    async def close(self, timeout_s: float = 1.0) -> None:
        """Stops answering. Close it before its transport."""
        self.node.is_alive = False
        if not self.transport.is_down:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.node.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    @property
    def num_known_nodes(self) -> int:
        """Nodes in our routing table; 0 at a joined peer means it is cut off."""
        return len(self.node.protocol.routing_table.uid_to_peer_id)

    def set_gate(self, gate: Gate) -> None:
        """The run is not open: leases are stored and believed only of peers that may join, and the gate learns their passes."""
        self._gate = gate
        self.validator.set_gate(gate)

    # -- leases -------------------------------------------------------------------------------------------------------

    async def announce(self, lease: Lease, timeout_s: float = 10.0) -> Lease:
        """Writes our lease for LEASE_TTL_S and returns it with its expiry. Renew it every LEASE_TTL_S / 3.

        Also finds initial peers again that were lost (a restarted bootstrap server would else hand out an empty directory).
        """
        assert lease.peer == self.key.peer_id, (lease.peer, self.key.peer_id)
        lease = replace(lease, addresses=_most_useful(lease.addresses), has_left=False)
        Lease.from_bytes(lease.to_bytes(), peer=lease.peer, expires_s=0.0)  # ValueError here, not a refusal everywhere
        with suppress(RunUnreachable):
            await self.greet_initial_peers(timeout_s=min(timeout_s, _RPC_TIMEOUT_S))
        written = await self._write_lease(lease, self._clock() + LEASE_TTL_S, timeout_s)
        self._announced = written
        return written

    async def leave(self, timeout_s: float = 2.0) -> None:
        """Replaces our lease by one that says we left. Nothing to do if none was announced."""
        if self._announced is None:
            return
        lease = replace(self._announced, has_left=True)
        # An update has to expire later than what it replaces, else holders keep the old one.
        await self._write_lease(lease, max(lease.expires_s + 1.0, self._clock() + LEASE_TTL_S), timeout_s)
        self._announced = None

    async def peers(self, stage: int, timeout_s: float = 10.0) -> list[Lease]:
        """The leases of a stage that have neither expired nor been given up, in the order of their PeerIDs."""
        return [lease for lease in await self.leases(stage, timeout_s) if not lease.has_left]

    async def leases(self, stage: int, timeout_s: float = 10.0) -> list[Lease]:
        """As `peers`, with those who have said that they go."""
        leases = await self._leases([lease_key(self._run_id, stage, bucket) for bucket in range(BUCKETS)], timeout_s)
        now = self._clock()
        here = [lease for lease in leases if lease.expires_s > now]
        # One that was stored before its writer was put out is still there.
        here = [lease for lease in here if lease.peer not in self.banned]
        return [lease for lease in here if self._gate is None or not self._gate.refusal(lease.peer, Right.JOIN, now)]

    async def keepers(self, timeout_s: float = 10.0) -> list[Lease]:
        """The leases of those who keep the states of all stages and train none."""
        return await self.peers(KEEPERS, timeout_s)

    async def _write_lease(self, lease: Lease, expires_s: float, timeout_s: float) -> Lease:
        key = lease_key(self._run_id, lease.stage, bucket_of(lease.peer))
        if await self.store(key, lease.to_bytes(), expires_s, timeout_s):
            return replace(lease, expires_s=expires_s)
        # A record of ours with a later expiry is there: a tombstone or lease of an earlier process, or our clock went back.
        own = [old.expires_s for old in await self._leases([key], timeout_s) if old.peer == lease.peer]
        later = min(max([expires_s, *own]) + 1.0, self._clock() + MAX_TTL_S)
        if own and later > max(own) and await self.store(key, lease.to_bytes(), later, timeout_s):
            return replace(lease, expires_s=later)
        raise RunUnreachable(
            f"no node of the directory took our lease of stage {lease.stage}: is this computer's clock right? If it is, "
            f"there is no room for more peers{_RETRY_LATER}"
        )

    async def _leases(self, keys: Sequence[str], timeout_s: float) -> list[Lease]:
        leases = []
        for entries in (await self._get(keys, timeout_s)).values():
            for peer, (raw, expires_s) in entries.items():
                with suppress(ValueError):  # cannot be: the validator let it in
                    leases.append(Lease.from_bytes(raw, peer=peer, expires_s=expires_s))
        return sorted(leases, key=lambda lease: lease.peer)

    # -- manifest -----------------------------------------------------------------------------------------------------

    async def publish_manifest(self, manifest: Manifest, timeout_s: float = 10.0) -> None:
        """Writes the manifest for MAX_TTL_S; a few peers renewing it every MAX_TTL_S / 3 are enough."""
        assert manifest.run_id == self._run_id, (manifest.run_id, self._run_id)
        self.validator.know(manifest)
        await self._publish(manifest_key(self._run_id), manifest.to_bytes(), MAX_TTL_S, "manifest", timeout_s)

    async def fetch_manifest(self, timeout_s: float = 10.0) -> Manifest:
        """The run's manifest, verified against the run id. Raises RunUnreachable if nobody has it, ManifestMismatch.

        Of a run that is not open, it also sets a gate, unless there is one: or strangers' leases would be read as peers'.
        """
        key = manifest_key(self._run_id)
        mismatch: ManifestMismatch | None = None
        for raw, _expires_s in (await self._get([key], timeout_s, any_holder=True)).get(key, {}).values():
            try:
                manifest = Manifest.from_bytes(raw, run_id=self._run_id)
                if self._gate is None and (gate := Gate.of(manifest)) is not None:
                    self.set_gate(gate)
            except ManifestMismatch as error:
                mismatch = error
            else:
                self.validator.know(manifest)
                return manifest
        raise mismatch or RunUnreachable(
            f"nobody here knows run {self._run_id[:12]}: it may be over, or the link names another run; ask its owner for a new link"
        )

    # -- revocations --------------------------------------------------------------------------------------------------

    async def publish_revocations(self, revocations: Revocations, timeout_s: float = 10.0) -> None:
        """Writes what the owner took back, for MAX_TTL_S. Anybody may: the signature is the owner's."""
        await self._publish(revocations_key(self._run_id), revocations.to_bytes(), MAX_TTL_S, "revocations", timeout_s)

    async def fetch_revocations(self, timeout_s: float = 10.0) -> Revocations | None:
        """The newest list of the owner's that any holder has; None if none has one. With a gate alone, which names the owner."""
        assert self._gate is not None
        key, found = revocations_key(self._run_id), []
        for raw, _expires_s in (await self._get([key], timeout_s)).get(key, {}).values():
            with suppress(ValueError):  # cannot be: the validator let it in
                found.append(Revocations.from_bytes(raw, run_id=self._run_id, owner=self._gate.owner))
        return max(found, key=lambda each: each.number, default=None)

    # -- the owner's word ---------------------------------------------------------------------------------------------

    async def publish_word(self, word: Checkpoint, timeout_s: float = 10.0) -> None:
        """Writes the owner's newest checkpoint of a stage for MAX_TTL_S, whoever signed this record: anybody who knows one
        may. Raises RunUnreachable, also when those asked know a newer one."""
        await self._publish(word_key(self._run_id, word.stage), encode_word(word), MAX_TTL_S, "owner's word", timeout_s)

    async def word(self, stage: int, timeout_s: float = 10.0) -> tuple[Checkpoint, float] | None:
        """The owner's newest checkpoint of a stage that is known here, verified, and for how many seconds it will be; None
        if there is none. The manifest has to be fetched or published before."""
        key = word_key(self._run_id, stage)
        words: list[tuple[Checkpoint, float]] = []
        for raw, expires_s in (await self._get([key], timeout_s)).get(key, {}).values():
            with suppress(ValueError):
                if expires_s > self._clock():
                    words.append((decode_word(raw), expires_s - self._clock()))
        return max(words, key=lambda word: (word[0].sequence, word[1]), default=None)

    async def publish_directive(self, directive: Directive, timeout_s: float = 10.0) -> None:
        """As `publish_word`, the owner's newest directive."""
        await self._publish(directive_key(self._run_id), directive.to_bytes(), MAX_TTL_S, "directive", timeout_s)

    async def directive(self, timeout_s: float = 10.0) -> tuple[Directive, float] | None:
        """As `word`, the owner's newest directive; of several with one number the first of `directives`."""
        key = directive_key(self._run_id)
        found = self._alive((await self._get([key], timeout_s)).get(key, {}))
        return next(((each, found[each]) for each in newest_first(found)), None)

    async def directives(self, timeout_s: float = 10.0) -> list[Directive]:
        """As wire/directives.py's newest_first has it, of all that are known here."""
        key = directive_key(self._run_id)
        return newest_first(self._alive((await self._get([key], timeout_s)).get(key, {})))

    def directives_here(self) -> list[Directive]:
        """As `directives`, of those that lie at this node: nobody is asked."""
        key = directive_key(self._run_id)
        return newest_first(self._alive(self._held_here([key]).get(key, {})))

    def _alive(self, records: Records) -> dict[Directive, float]:
        """The directives in these records, and for how many seconds each will be there."""
        found, now = dict[Directive, float](), self._clock()
        for raw, expires_s in records.values():
            with suppress(ValueError):
                if expires_s > now:
                    directive = read_directive(raw)
                    found[directive] = max(expires_s - now, found.get(directive, 0.0))
        return found

    # -- the node -----------------------------------------------------------------------------------------------------

    async def greet_initial_peers(self, timeout_s: float = _RPC_TIMEOUT_S) -> None:
        """Makes initial peers and us known to one another again where the routing table has lost them."""
        from hivemind.p2p import PeerID

        known = {str(peer) for peer in self.node.protocol.routing_table.uid_to_peer_id.values()}
        lost: dict[PeerId, list[str]] = {}
        for text in self._initial_peers:
            peer = parse_multiaddr(text, "peer").peer
            assert peer is not None
            if peer not in known:
                lost.setdefault(peer, []).append(text)

        async def greet(peer: PeerId, addresses: list[str]) -> None:
            with suppress(PeerUnavailable):
                await self.transport.connect(peer, addresses, timeout_s)
                await self.node.protocol.call_ping(PeerID.from_base58(peer))

        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(greet(peer, addresses) for peer, addresses in lost.items()))

    async def _publish(self, key: str, raw: bytes, ttl_s: float, what: str, timeout_s: float) -> None:
        if not await self.store(key, raw, self._clock() + ttl_s, timeout_s):
            raise RunUnreachable(f"no node of the directory took the {what}: is this computer's clock right?")

    async def store(self, key: str, raw: bytes, expires_s: float, timeout_s: float) -> bool:
        """Whether another node took the record; where none answers, whether we did."""
        self._check_up()
        nearest = Stored()
        named = Stored(nearest.calls)
        is_kept = False
        try:
            async with asyncio.timeout(timeout_s):
                _, is_kept = await asyncio.gather(
                    self._store_at_nearest(key, raw, float(expires_s), nearest),
                    self._named.store(key, raw, float(expires_s), self.key.peer_id, named),
                )
        except TimeoutError:
            if not any(nearest.answers + named.answers):
                raise RunUnreachable(f"the directory took no record within {timeout_s:g} s{_RETRY_LATER}") from None
        answers = nearest.answers + named.answers
        return any(answers) if answers else is_kept

    async def _store_at_nearest(self, key: str, raw: bytes, expires_s: float, stored: Stored) -> None:
        from hivemind.dht.routing import DHTID

        _stored.set(stored)  # in the task that gather made of this
        await self.node.store(key, raw, expires_s, subkey=str(self.key.peer_id))
        if not any(stored.answers):
            self._forget_nearest(DHTID.generate(source=key))

    async def _get(self, keys: Sequence[str], timeout_s: float, *, any_holder: bool = False) -> dict[str, Records]:
        """key -> writer -> (record, expiry), merged over all holders, or of the first holder found; and what the link's peers tell."""
        self._check_up()
        walk_s = _WALK_PART * timeout_s
        (nearest, is_whole), told = await asyncio.gather(
            self._walk(keys, walk_s, any_holder=any_holder), self._named.find(keys, walk_s)
        )
        if not (is_whole or told or any(nearest.values())):
            raise RunUnreachable(f"the directory gave no answer within {timeout_s:g} s{_RETRY_LATER}")
        for key in told:
            self._named.others_found(key, nearest.get(key, {}))
        return merged(self._held_here(keys), nearest, told)

    async def _walk(
        self, keys: Sequence[str], timeout_s: float, *, any_holder: bool
    ) -> tuple[dict[str, Records], bool]:
        """What the nearest nodes tell, and whether that is all. Where some are late it is what the others said: hivemind's walk waits for each."""
        from hivemind.dht.routing import DHTID

        heard = list[tuple[Any, Any]]()
        _heard.set(heard)  # in the task that gather made of this
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                found = await self.node.get_many(
                    list(keys), sufficient_expiration_time=None if any_holder else float("inf")
                )
            nearest: dict[str, Records] = {
                key: {PeerId(peer): (entry.value, entry.expiration_time) for peer, entry in item.value.items()}
                for key, item in found.items()
                if item is not None and isinstance(item.value, dict)
            }
            return nearest, True
        key_of = {DHTID.generate(source=key): key for key in keys}
        answers = ({key_of[key_id]: self._named.records(key_id, each)} for key_id, each in heard if key_id in key_of)
        return merged(*answers), False

    def _held_here(self, keys: Sequence[str]) -> dict[str, Records]:
        from hivemind.dht.routing import DHTID

        held: dict[str, Records] = {}
        for key in keys:
            key_id = DHTID.generate(source=key)
            if (item := self.node.protocol.storage.get(key_id)) is not None:
                held[key] = self._named.records(key_id, item.value)
        return held

    def _check_up(self) -> None:
        if self.transport.is_down:
            raise RunUnreachable("this peer's own p2pd has ended: the directory is gone with it")


def _most_useful(addresses: Sequence[str]) -> tuple[str, ...]:
    """As many as a lease may have; of a host with very many addresses those that only itself can use go first."""
    if len(addresses) > MAX_ADDRESSES:
        addresses = [text for text in addresses if not text.startswith(("/ip4/127.", "/ip6/::1/"))]
    return tuple(addresses[:MAX_ADDRESSES])


def _keep_answers(node: "DHTNode") -> None:
    """Makes node tell what each other node answered to a store, and what it told of keys; and hand on nothing.

    hivemind returns the last answer to a store alone, so one node that refuses everything would make a store that five took a failure, and our own
    copy would make one that nobody took a success. Of a walk that is broken off it tells nothing. To each node that comes it sends all records
    that lie nearer to it, megabytes for a ping, and again when it comes again; but their writers send them every half minute.
    """
    protocol: Any = node.protocol
    call_store, call_find = protocol.call_store, protocol.call_find

    async def store(peer: Any, *args: Any, **call: Any) -> StoreAnswers:
        if args:  # as hivemind hands on alone
            return None
        stored, made = _stored.get(), partial(call_store, peer, **call)
        return await made() if stored is None else await stored.ask(str(peer), made)

    async def find(peer: Any, keys: Collection[Any]) -> Any:
        answer, heard = await call_find(peer, keys), _heard.get()
        if heard is not None and answer is not None:
            heard += ((key, value.value) for key, (value, _nearest) in answer.items() if value is not None)
        return answer

    protocol.call_store, protocol.call_find = store, find
