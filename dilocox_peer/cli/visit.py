"""A short visit to a live run, by somebody who is no peer of it: what `export`, `generate` and `doctor` look through.

The visitor has a key of its own that ends with the visit, so it can come while a peer of the same name is training. In a run
that takes the invited it comes as the same reader again, with key and pass kept: each new key would use the invitation up. It
listens on loopback only, unless told otherwise: who only asks need not be dialled.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilocox_peer.admission import Right
from dilocox_peer.cli.home import PeerHome
from dilocox_peer.errors import DilocoxError, PeerUnavailable, ProtocolError, RunUnreachable
from dilocox_peer.events import Event, StateFetched, StateFetchFailed
from dilocox_peer.invitation import Invitation
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.identity import Identity
from dilocox_peer.types import Digest, PeerId

if TYPE_CHECKING:
    from dilocox_peer.admission import Grant
    from dilocox_peer.dht.directory import Directory
    from dilocox_peer.dht.records import Lease
    from dilocox_peer.peer.network.transport import Transport
    from dilocox_peer.peer.state.anchors import SameRound
    from dilocox_peer.peer.training.outer import AnchorState
    from dilocox_peer.pipeline.whole import WholeModel

CHAIN_S = 60.0  # for a stage's certificates from one donor
PROOF_S = 10.0  # for the certificate of the next round, which names the digests of this one's states
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
ASK_S = 15.0  # a donor keeps the question that long when it has nothing new
FETCH_S = 3600.0  # for one state; a donor that stalls is given up sooner
RETRY_S = 0.5
READER = "reader"  # the name of who visits a run that takes the invited
PASS_FILE = "pass"  # as peer/entry.py keeps it, which is not imported before it is needed

Say = Callable[[str], None]


@dataclass(frozen=True)
class Visit:
    """What is open while the visit lasts."""

    transport: "Transport"
    directory: "Directory"
    identity: Identity
    grant: "Grant | None"
    run_folder: Path

    async def enter(self) -> Manifest:
        """The run's settings, after which its peers let the visitor read. Raises RunUnreachable, RunRefused."""
        from dilocox_peer.peer.entry import Newcomer, come_in

        manifest = await self.directory.fetch_manifest()
        newcomer = Newcomer(self.identity.peer_id, self.grant, self.run_folder, right=Right.READ)
        await come_in(newcomer, manifest, transport=self.transport, directory=self.directory)
        return manifest


@asynccontextmanager
async def visit(
    invitation: Invitation,
    *,
    host_maddrs: Sequence[str] = LOOPBACK,
    initial_peers: Sequence[str] = (),
    reader: PeerHome | None = None,
) -> AsyncIterator[Visit]:
    """A visit; nothing of it is left afterwards but a reader's key and pass. reader: of a visitor that means to `enter`.

    Raises RunUnreachable, ConfigError.
    """
    from dilocox_peer.dht.directory import Directory
    from dilocox_peer.peer.network.transport import Transport

    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dilocox-visit-")))
        key, run_folder = folder / "identity.key", folder
        if reader is not None:
            kept = reader.run_folder(invitation.run_id)
            if invitation.grant is not None or (kept / PASS_FILE).exists():
                reader.make()
                key, run_folder = reader.identity_path, kept
        identity = stack.enter_context(Identity.open(key))
        transport = await Transport.create(
            identity.path,
            identity.peer_id,
            namespace=invitation.run_id,
            initial_peers=(*invitation.addresses, *initial_peers),
            host_maddrs=host_maddrs,
            runtime_dir=folder / "runtime",
        )
        stack.push_async_callback(transport.close)
        directory = await Directory.create(transport, invitation.run_id, identity.key)
        stack.push_async_callback(directory.close)
        yield Visit(transport, directory, identity, invitation.grant, run_folder)


async def fetch_whole_model(
    invitation: Invitation, *, timeout_s: float, say: Say, reader: PeerHome | None = None
) -> "WholeModel":
    """The model after the newest round that all stages have. Each stage's certificates are verified from the first on, and
    name the state's round and digest; where they do not name the digest yet, a second peer's is compared. reader: its key is
    used where the run takes the invited.

    Raises RunUnreachable: a stage has no peer, nobody answers, or no round is complete within timeout_s; DilocoxError: a state
    is not what was certified.
    """
    from dilocox_peer.peer.state.anchors import SameRound, assemble

    async with visit(invitation, reader=reader) as open_visit:
        manifest = await open_visit.enter()
        gatherer = _Gatherer(open_visit, manifest, SameRound(manifest.stages.count), say)
        try:
            async with asyncio.timeout(timeout_s):
                states = await gatherer.gather()
        except TimeoutError:
            raise RunUnreachable(gatherer.why_not(timeout_s)) from None
        for stage, state in enumerate(states):
            await gatherer.prove(stage, state)
        return assemble(manifest, states)


class _Gatherer:
    """Asks donors until all stages' states of one round are here."""

    def __init__(self, open_visit: Visit, manifest: Manifest, same_round: "SameRound", say: Say) -> None:
        self._visit = open_visit
        self._manifest = manifest
        self._same_round = same_round
        self._say = say
        self._unserved: set[int] = set()
        self._reached: dict[int, list[PeerId]] = {}
        self._donor: dict[tuple[int, Digest], PeerId] = {}

    async def gather(self) -> "tuple[AnchorState, ...]":
        while (found := self._same_round.found()) is None:
            async with asyncio.TaskGroup() as tasks:
                for stage, request in self._same_round.requests(ASK_S).items():
                    tasks.create_task(self._ask(stage, request), name=f"ask stage {stage}")
        return found

    async def prove(self, stage: int, state: "AnchorState") -> None:
        """Raises DilocoxError when the state is not what the stage has certified, or two of its peers differ."""
        certified = await self._certified(stage, state)
        if certified is None:
            await self._compare(stage, state)
        elif certified != state.digest:
            raise DilocoxError(
                f"the state of stage {stage} is not the one that its peers certified for round {state.round}: try again"
            )

    async def _certified(self, stage: int, state: "AnchorState") -> bytes | None:
        """The digest that the certificates after it name for the state's head; None if none does yet.

        Raises DilocoxError when no certificate is at that head, or it is of another round.
        """
        from dilocox_peer.peer.state.backup import Annals
        from dilocox_peer.peer.state.backup_exchange import fetch_chain
        from dilocox_peer.signing import verify

        annals, digest = Annals(self._manifest, stage, verify), b""
        deadline = asyncio.get_running_loop().time() + PROOF_S
        while True:
            for donor in self._reached[stage]:
                with suppress(PeerUnavailable, ProtocolError):
                    await fetch_chain(self._visit.transport, donor, annals, CHAIN_S)
                if digest := annals.digest_at(state.head):
                    break
            last = annals.round_at(state.head)
            if last is not None and last != state.round:
                raise DilocoxError(f"a peer of stage {stage} calls round {last} round {state.round}: try again")
            if digest or asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(RETRY_S)
        if last is None:
            raise DilocoxError(f"no certificate of stage {stage} leads to its state of round {state.round}: try again")
        if digest:
            self._say(f"stage {stage}: round {state.round} as {annals.signers_of(state.head)} certified it")
        return digest or None

    async def _compare(self, stage: int, state: "AnchorState") -> None:
        donor = self._donor[stage, state.head]
        others = [peer for peer in self._reached[stage] if peer != donor]
        second = await self._fetch(stage, others, {"head": state.head})
        if second is None:
            self._say(f"stage {stage}: no second peer has the state of round {state.round}, to compare with")
        elif second.digest != state.digest:
            raise DilocoxError(
                f"two peers of stage {stage} have different states at the same head: one of them is wrong; try again"
            )

    def why_not(self, timeout_s: float) -> str:
        if self._unserved:
            stages = ", ".join(str(stage) for stage in sorted(self._unserved))
            return f"nobody serves stage {stages} of the run: a peer has to join it first"
        return (
            f"no round of which all stages are served came within {timeout_s:g} s ({self._same_round.describe()}): "
            "try again with a longer --timeout"
        )

    async def _ask(self, stage: int, request: dict[str, int | float]) -> None:
        """One question to the stage's peers; what they send is added."""
        try:
            donors = await self._donors(stage)
        except RunUnreachable as error:
            self._say(str(error))
            donors = []
        state = await self._fetch(stage, donors, request)
        if state is None:
            await asyncio.sleep(RETRY_S)
            return
        self._same_round.add(stage, state)
        self._say(f"stage {stage}: round {state.round}, {state.size_bytes / 1e6:.1f} MB")

    async def _donors(self, stage: int) -> list[PeerId]:
        """Peers of the stage that can be reached: those who can be dialled and are furthest first."""
        leases: list[Lease] = await self._visit.directory.peers(stage)
        leases.sort(key=lambda lease: (lease.reachability != "direct", -lease.round, lease.peer))
        reached = []
        for lease in leases:
            with suppress(PeerUnavailable):
                await self._visit.transport.connect(lease.peer, lease.addresses)
                reached.append(lease.peer)
        if reached:
            self._unserved.discard(stage)
        else:
            self._unserved.add(stage)
        self._reached[stage] = reached
        return reached

    async def _fetch(self, stage: int, donors: "Sequence[PeerId]", request: dict[str, Any]) -> "AnchorState | None":
        from dilocox_peer.peer.state.statesync import fetch_state
        from dilocox_peer.pipeline.model import layout_of

        donor: PeerId | None = None

        def hear(event: Event) -> None:
            nonlocal donor
            if isinstance(event, StateFetched):
                donor = event.donor
            elif isinstance(event, StateFetchFailed):
                self._say(event.line())

        state = await fetch_state(
            self._visit.transport,
            donors,
            request,
            layout=layout_of(self._manifest, stage),
            expected=b"",
            timeout_s=FETCH_S,
            listener=hear,
        )
        if state is not None and donor is not None:
            self._donor.setdefault((stage, state.head), donor)
        return state
