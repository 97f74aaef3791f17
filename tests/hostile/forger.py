"""A stranger that wants the run: `python -m tests.hostile.forger LINK --home FOLDER`. It has the link, its own key, and as many
made-up ones as it likes; it is built from the package's own classes, as anybody's attacker would be.

Orders come as lines of JSON on its standard input; what it does is told in events, like a peer's:

    {"mode": "s2"}                     a chain of its own from the honest tip on, to the run's last round, with its state
    {"mode": "past", "back": 3}        the same from some rounds ago
    {"mode": "held", "victim": PEER}   the same from the tip as it is now, kept, and shown to one peer
    {"mode": "genesis"}                another first roster: self-signed, and with the owner's name on it; a chain on top
    {"mode": "donor", "lie": WHAT}     claims to hold the newest state, and serves another one: under an "outline" of its own, or
                                       other "bytes" under the right one
    {"mode": "impostor"}               signs first rosters and checkpoints as if it were the owner, publishes a word
    {"mode": "record", "file": PATH}   keeps what this run says
    {"mode": "replay", "file": PATH}   says what another run said
    {"mode": "heir"}                   as s2 once, and says to be a keeper of the run and a peer of its stage, who has it all
    {"mode": "rest"}                   nothing
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack

from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease, decode_word, encode_word
from dilocox_peer.errors import PeerUnavailable, ProtocolError, RunUnreachable
from dilocox_peer.invitation import parse_invitation
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.network.transport import Reply, Transport
from dilocox_peer.peer.identity import Identity, encode_key
from dilocox_peer.peer.planning.plan import plan_bounds
from dilocox_peer.peer.rounds.chain import Chain
from dilocox_peer.peer.rounds.genesis import genesis_of
from dilocox_peer.peer.rounds.outbox import Outbox
from dilocox_peer.peer.state.backup import MAX_CHAIN_BYTES, page_after
from dilocox_peer.peer.state.backup_exchange import BACKUP_SERVICE
from dilocox_peer.peer.state.statesync import STATE_SERVICE
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.signing import SEED_BYTES, SigningKey
from dilocox_peer.store.pull import STORE_SERVICE
from dilocox_peer.types import PeerId
from dilocox_peer.wire.chain import Certificate, decode_chain, encode_chain
from dilocox_peer.wire.checkpoints import Checkpoint, sign_checkpoint
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.records import KEEPERS
from dilocox_peer.wire.rounds import (
    MAX_PAGE,
    Cert,
    ChainPage,
    GetChain,
    Heartbeat,
    Message,
    Vouch,
    decode_message,
    encode_message,
)
from tests.hostile.forgery import branch, chain_with, sybils

TICK_S = 1.0
FORGE_EVERY = 3  # ticks
LEASE_EVERY = 20
SEND_S = 5.0
FORGING = ("s2", "past", "held", "genesis", "heir")
RECORDED = 400  # messages


class Forger:
    """`run` until standard input ends."""

    def __init__(self, manifest: Manifest, identity: Identity, transport: Transport, directory: Directory) -> None:
        self._manifest = manifest
        self._key = identity.key
        self._me = identity.peer_id
        self._transport = transport
        self._directory = directory
        self._incarnation = time.time_ns() // 1_000_000
        self._genesis = genesis_of(manifest, 0)
        self._chain = Chain(self._genesis)
        self._bounds = plan_bounds(manifest)
        self._keys = {self._me: identity.key, **sybils(seed=os.urandom(8))}
        layout = layout_of(manifest, 0)
        nothing = bytes(4 * layout.num_elements)
        self._state = AnchorState.of(layout, head=self._genesis.head, round_number=0, anchor=nothing, momentum=nothing)
        self._order: dict[str, Any] = {"mode": "rest"}
        self._forged: list[Certificate] = []
        self._victims: set[PeerId] = set()
        self._said: dict[PeerId, Heartbeat] = {}
        self._recorded: list[bytes] = []
        self._ticks = self._shown = self._served = 0
        self._outbox: Outbox | None = None

    async def run(self) -> None:
        self._transport.set_message_handler(self._receive)
        await self._transport.serve(STORE_SERVICE, self._serve_thing)
        await self._transport.serve(STATE_SERVICE, self._serve_digest)
        await self._transport.serve(BACKUP_SERVICE, self._serve_chain)
        with suppress(RunUnreachable):
            await self._directory.announce(self._lease())
        tell("ForgerReady", peer=self._me, addresses=list(self._transport.addresses))
        async with asyncio.TaskGroup() as tasks:
            self._outbox = Outbox(tasks, self._send, lambda _error: None)
            orders = tasks.create_task(self._read_orders())
            while not orders.done():
                began = time.monotonic()
                await self._tick()
                await asyncio.wait({orders}, timeout=max(TICK_S - (time.monotonic() - began), 0.05))

    def _lease(self) -> Lease:
        return Lease(
            peer=self._me, stage=0, incarnation=self._incarnation, addresses=tuple(self._transport.addresses), protocol=1,
            tokens_per_s=1e6, memory_bytes=1, reachability="direct", round=10**6,
        )  # fmt: skip

    async def _read_orders(self) -> None:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            self._order = json.loads(line)
            self._forged, self._shown, self._served = [], 0, 0
            if self._mode in ("held", "heir"):
                self._forge(len(self._chain.certificates))
            if self._mode == "heir":
                with suppress(RunUnreachable):
                    await self._directory.announce(replace(self._lease(), stage=KEEPERS))
            tell("ForgerObeys", mode=self._mode, height=self._chain.height)

    @property
    def _mode(self) -> str:
        return str(self._order["mode"])

    # ---- what it hears ----

    def _receive(self, sender: PeerId, raw: bytes) -> None:
        try:
            message = decode_message(raw, sender)
        except ProtocolError:
            return
        if self._mode == "record" and len(self._recorded) < RECORDED:
            self._recorded.append(raw)
        is_new = sender not in self._victims
        self._victims.add(sender)
        match message:
            case Heartbeat():
                self._said[sender] = message
                if is_new and self._mode == "donor":
                    self._claim()  # before it has asked others
            case ChainPage():
                for certificate in message.certificates:
                    self._learn(certificate)
            case Cert():
                self._learn(message.certificate)
            case GetChain() if self._forged and self._mode in FORGING and self._is_victim(sender):
                self._answer(sender, message)

    def _learn(self, certificate: Certificate) -> None:
        height = self._chain.height_of(certificate.parent)
        if height is None or self._chain.height_of(certificate.head) is not None:
            return
        self._chain.truncate(height)
        self._chain.append(certificate)

    def _answer(self, sender: PeerId, message: GetChain) -> None:
        heights = {each.head: each.value.height for each in self._forged} | {self._genesis.head: 0}
        height = next((heights[head] for head in message.locator if head in heights), None)
        if height is not None:
            self._post(sender, self._page(height))

    async def _serve_thing(self, peer: PeerId, header: dict[str, Any]) -> Reply:
        """Any state that is asked for: of zeros under its own outline, or under the right one, which an honest peer gives."""
        donor = next(iter(self._said), None)
        if self._mode == "rest" or "name" not in header:
            return Reply({})
        if self._order.get("lie") == "bytes" and self._mode == "donor" and donor is not None:
            if "want" in header:
                said, body = await self._transport.fetch(
                    donor, STORE_SERVICE, header, max_body_bytes=1 << 20, timeout_s=20.0
                )
                return Reply(said, [bytes(len(body)) if len(body) == said.get("size") else body])
        elif "want" in header:
            self._tell_served(peer)
            return Reply({"size": self._state.size_bytes}, [self._state.outline.packed()])
        self._tell_served(peer)
        return Reply({}, [bytes(header["stop"] - header["start"])])

    async def _serve_digest(self, _peer: PeerId, header: dict[str, Any]) -> Reply:
        return Reply({"head": header["head"], "digest": self._state.digest} if self._mode == "heir" else {})

    async def _serve_chain(self, peer: PeerId, header: dict[str, Any]) -> Reply:
        if self._mode != "heir" or not self._forged:
            return Reply({})
        tip = self._forged[-1].value
        if header["want"] == "summary":
            return Reply({"height": tip.height, "round": tip.round - 1, "weight": tip.weight, "reached": tip.round}, [])
        self._tell_served(peer)
        page = page_after(self._forged, header["locator"])
        more = bool(page) and page[-1] is not self._forged[-1]
        return Reply({"more": more}, [encode_chain(page)])

    def _tell_served(self, peer: PeerId) -> None:
        self._served += 1
        tell("StateServed", to=peer, mode=self._mode, lie=self._order.get("lie"))

    # ---- what it does ----

    async def _tick(self) -> None:
        self._ticks += 1
        if self._ticks % 3 == 1:
            await self._look()
        if self._ticks % LEASE_EVERY == 0:
            with suppress(RunUnreachable):
                await self._directory.announce(self._lease(), timeout_s=3.0)
        place = self._chain.place
        for peer in self._victims:
            self._post(peer, GetChain(0, place.head, place.view, tuple(self._chain.locator())))
        match self._mode:
            case "s2" | "past" | "genesis" if self._ticks % FORGE_EVERY == 0:
                back = {"s2": 0, "genesis": 10**9}.get(self._mode, self._order.get("back", 0))
                self._forge(max(self._chain.height - back, 0))
            case "donor":
                self._claim()
            case "impostor":
                await self._vouch()
            case "record":
                self._record(await self._word())
                self._shown += 1
            case "replay":
                self._replay()
        if self._forged:
            self._show()
        if self._mode != "rest":
            tell("ForgerActed", mode=self._mode, shown=self._shown, served=self._served, height=self._chain.height, forged=len(self._forged))  # fmt: skip

    async def _look(self) -> None:
        with suppress(RunUnreachable):
            for lease in await self._directory.peers(0):
                if lease.peer == self._me or lease.peer in self._victims:
                    continue
                with suppress(PeerUnavailable):
                    await self._transport.connect(lease.peer, lease.addresses, SEND_S)
                    self._victims.add(lease.peer)

    def _is_victim(self, peer: PeerId) -> bool:
        return bool(self._order.get("victim", peer) == peer)

    def _forge(self, start: int) -> None:
        how: dict[str, Any] = {
            "insiders": {}, "outsiders": self._keys, "bounds": self._bounds, "max_peers": self._manifest.limits.max_peers,
            "state_digest": self._state.digest,
        }  # fmt: skip
        if self._mode != "genesis":
            if self._chain.height:
                self._forged = chain_with(self._genesis, self._chain.certificates, start, **how)
            return
        [first, *_] = branch(self._genesis, **how, most=1)
        if self._ticks % 2:
            assert self._genesis.founder is not None
            first = replaced(first, signatures=((self._genesis.founder, dict(first.signatures)[self._me]),))
        place = self._genesis.then(first)
        self._forged = [first, *branch(place, **how)]

    def _page(self, height: int) -> ChainPage:
        tip = self._forged[-1]
        page = tuple(self._forged[height : height + MAX_PAGE])
        return ChainPage(0, tip.head, tip.view, page, height + len(page) < len(self._forged))

    def _show(self) -> None:
        """Its head, as a member would, and its chain unasked: from where it leaves the agreed one."""
        tip = self._forged[-1]
        start = next((at for at, each in enumerate(self._forged) if self._chain.height_of(each.head) is None), 0)
        for peer in filter(self._is_victim, self._victims):
            self._post(peer, self._beat(tip))
            if self._mode == "genesis":
                self._post(peer, Cert(0, tip.head, tip.view, self._forged[0]))
            for height in range(start, len(self._forged), MAX_PAGE):
                self._post(peer, self._page(height))
            self._shown += 1

    def _beat(self, tip: Certificate) -> Heartbeat:
        value = tip.value
        return Heartbeat(
            0, tip.head, tip.view, self._incarnation, value.height, value.round, 2**40, value.round + 1, 0, True,
            self._state.digest,
        )  # fmt: skip

    def _claim(self) -> None:
        """To be where the others are, with the state that they have."""
        if not self._said:
            return
        newest = max((each for each in self._said.values() if each.ready), key=lambda each: each.height, default=None)
        if newest is None:
            return
        for peer in self._victims:
            self._post(peer, replaced(newest, incarnation=self._incarnation, micro_batches=0))
            self._shown += 1

    async def _vouch(self) -> None:
        """As the owner: a first roster, and checkpoints of a made-up end and of a past head."""
        genesis = self._genesis
        first = branch(
            genesis, insiders={}, outsiders=self._keys, bounds=self._bounds, max_peers=self._manifest.limits.max_peers,
            state_digest=self._state.digest, most=1,
        )[0]  # fmt: skip
        assert genesis.founder is not None
        as_owner = replaced(first, signatures=((genesis.founder, dict(first.signatures)[self._me]),))
        as_itself = replaced(first, signatures=((self._me, dict(first.signatures)[self._me]),))
        end = Checkpoint(0, genesis.head, 10**6, 10**6, first.head, 2**50 + self._ticks, True)
        past = Checkpoint(0, genesis.head, 1, 0, self._chain.head_at(min(1, self._chain.height)), 2**50, False)
        words = [sign_checkpoint(each, self._key.sign) for each in (end, past)]
        for peer in self._victims:
            for each in (as_owner, as_itself):
                self._post(peer, Cert(0, genesis.head, 1, each))
            for word in words:
                self._post(peer, Vouch(0, genesis.head, 1, word))
            self._shown += 1
        validator: Any = self._directory.validator
        validator.check_word = lambda *_given: None  # its own node takes what it says
        for word in words:
            with suppress(RunUnreachable):
                await self._directory.publish_word(word, timeout_s=3.0)
                tell("WordTaken", sequence=word.sequence)

    async def _word(self) -> Checkpoint | None:
        with suppress(RunUnreachable):
            if (found := await self._directory.word(0, timeout_s=3.0)) is not None:
                return found[0]
        return None

    def _record(self, word: Checkpoint | None) -> None:
        chain = encode_chain(self._chain.certificates)
        kept: bytes = msgpack.packb([self._recorded, chain, None if word is None else encode_word(word)])
        path = Path(self._order["file"])
        path.with_suffix(".new").write_bytes(kept)
        path.with_suffix(".new").replace(path)

    def _replay(self) -> None:
        raws, chain, told = msgpack.unpackb(Path(self._order["file"]).read_bytes())
        certificates = decode_chain(chain, MAX_CHAIN_BYTES)
        word = None if told is None else decode_word(told)
        place = self._chain.place
        for peer in self._victims:
            for at in range(self._ticks % 7, len(raws), 7):
                self._post_raw(peer, raws[at])
            if certificates:
                tip = certificates[-1]
                self._post(peer, self._beat(tip))
                for height in range(0, len(certificates), MAX_PAGE):
                    page = tuple(certificates[height : height + MAX_PAGE])
                    self._post(peer, ChainPage(0, tip.head, tip.view, page, height + len(page) < len(certificates)))
                here = certificates[min(len(certificates), place.height + 1) - 1]
                self._post(peer, Cert(0, place.head, place.view, here))
                # The very certificates, moved to where this run is.
                moved = replaced(here, parent=place.head, view=place.view)
                self._post(peer, Cert(0, place.head, place.view, moved))
            if word is not None:
                self._post(peer, Vouch(0, place.head, place.view, word))
                self._post(peer, Vouch(0, place.head, place.view, replaced(word, genesis=self._genesis.head)))
            self._shown += 1

    def _post(self, peer: PeerId, message: Message) -> None:
        self._post_raw(peer, encode_message(message))

    def _post_raw(self, peer: PeerId, raw: bytes) -> None:
        assert self._outbox is not None, "before run"
        self._outbox.post(peer, raw)

    async def _send(self, peer: PeerId, messages: Sequence[bytes]) -> list[str]:
        return await self._transport.send_all(peer, messages, SEND_S)


def tell(event: str, **fields: Any) -> None:
    print(json.dumps({"time": time.time(), "event": event, **fields}), flush=True)


def low_key(tries: int = 300) -> bytes:
    """The seed of a PeerID that comes before most others: donors are asked in their order."""
    seeds = [os.urandom(SEED_BYTES) for _ in range(tries)]
    return min(seeds, key=lambda seed: SigningKey(seed).peer_id)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("link")
    parser.add_argument("--home", type=Path, required=True)
    given, _ = parser.parse_known_args()
    given.home.mkdir(parents=True, exist_ok=True)
    path = given.home / "identity.key"
    if not path.exists():
        path.write_bytes(encode_key(low_key()))
        path.chmod(0o600)
    invitation = parse_invitation(given.link)
    async with AsyncExitStack() as stack:
        identity = stack.enter_context(Identity.open(path))
        transport = await Transport.create(
            identity.path, identity.peer_id, namespace=invitation.run_id, initial_peers=invitation.addresses,
            runtime_dir=given.home / "runtime",
        )  # fmt: skip
        stack.push_async_callback(transport.close)
        directory = await Directory.create(transport, invitation.run_id, identity.key)
        stack.push_async_callback(directory.close)
        manifest = await directory.fetch_manifest()
        await Forger(manifest, identity, transport, directory).run()


if __name__ == "__main__":
    asyncio.run(main())
