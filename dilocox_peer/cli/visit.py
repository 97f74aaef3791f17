"""A short visit to a live run, by somebody who is no peer of it: what `export`, `generate` and `doctor` look through.

The visitor has a key of its own that ends with the visit, so it can come while a peer of the same name is training. In a run
that takes the invited it comes as the same reader again, with key and pass kept: each new key would use the invitation up. It
listens on loopback only, unless told otherwise: who only asks need not be dialled.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dilocox_peer.admission import Right
from dilocox_peer.cli.home import PeerHome
from dilocox_peer.errors import RunUnreachable
from dilocox_peer.events import Event
from dilocox_peer.invitation import Invitation
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.identity import Identity

if TYPE_CHECKING:
    from dilocox_peer.admission import Grant
    from dilocox_peer.dht.directory import Directory
    from dilocox_peer.model.whole import WholeModel
    from dilocox_peer.network.transport import Transport
    from dilocox_peer.peer.training.anchor_state import AnchorState
    from dilocox_peer.types import Digest

PROOF_S = 10.0  # for the certificate of the next round, which names the digests of this one's states
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
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

    async def settings(self, timeout_s: float = 10.0) -> Manifest:
        """timeout_s: of the directory. Raises RunUnreachable, which names our clock where that is why, and ManifestMismatch."""
        from dilocox_peer.peer.arrival import settings_of

        return await settings_of(self.directory, self.transport, timeout_s)

    async def enter(self) -> Manifest:
        """The run's settings, after which its peers let the visitor read. Raises RunUnreachable, RunRefused."""
        from dilocox_peer.model.architecture import prepare
        from dilocox_peer.peer.entry import Newcomer, come_in

        manifest = await self.settings()
        await asyncio.to_thread(prepare, manifest)
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
    from dilocox_peer.network.transport import Transport

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
    invitation: Invitation,
    *,
    timeout_s: float,
    say: Say,
    reader: PeerHome | None = None,
    entered: Callable[[], None] = lambda: None,
) -> "WholeModel":
    """The model after the newest round that the certificates of all stages name the states of; they are verified from the first
    one on. Of a run that is over, or has no such round within PROOF_S, the tip's, when the stages' voters agree on it. reader:
    its key is used where the run takes the invited. entered: told before the wait for a round.

    Raises RunUnreachable: nobody has the run's state, which is told after PROOF_S; or a stage has no peer, nobody answers, or no round is
    complete within timeout_s.
    """
    from dilocox_peer.peer.state.anchors import assemble

    async with visit(invitation, reader=reader) as open_visit:
        manifest = await open_visit.enter()
        entered()
        gatherer = _Gatherer(open_visit, manifest, say)
        try:
            async with asyncio.timeout(timeout_s):
                states = await gatherer.gather()
        except TimeoutError:
            raise RunUnreachable(gatherer.why_not(timeout_s)) from None
        return assemble(manifest, states, gatherer.contributors(states[0].head))


class _Gatherer:
    """Looks until all stages' states of one round are here."""

    def __init__(self, open_visit: Visit, manifest: Manifest, say: Say) -> None:
        from dilocox_peer.peer.state.survey import surveys

        self._say = say
        self._surveys = surveys(
            manifest, transport=open_visit.transport, directory=open_visit.directory, listener=self._hear
        )

    async def gather(self) -> "tuple[AnchorState, ...]":
        from dilocox_peer.peer.state.survey import common_tip, fetch_newest, look_at_all, newest_common

        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            try:
                await look_at_all(self._surveys)
            except RunUnreachable as error:
                self._say(str(error))
                await asyncio.sleep(RETRY_S)
                continue
            if all(survey.is_unheld for survey in self._surveys) and loop.time() - began > PROOF_S:
                raise RunUnreachable(
                    "nobody has begun the run, or all who had its state have left: a peer has to join it first"
                )
            is_over = all(survey.annals.is_over for survey in self._surveys)
            named = newest_common(self._surveys)
            at_tip = None
            if is_over or (named is None and loop.time() - began > PROOF_S):
                at_tip = await common_tip(self._surveys)
            wanted = at_tip or named
            if wanted is not None and (states := await fetch_newest(self._surveys, wanted)) is not None:
                self._tell(states, is_tip=at_tip is not None and states[0].round == at_tip[0].round)
                return states
            await asyncio.sleep(RETRY_S)

    def _tell(self, states: "Sequence[AnchorState]", *, is_tip: bool) -> None:
        for survey, state in zip(self._surveys, states, strict=True):
            signers = survey.annals.signers_of(state.head)
            how = ", and the state as its peers name it: no certificate does yet" if is_tip else ""
            self._say(
                f"stage {survey.stage}: round {state.round}, {state.size_bytes / 1e6:.1f} MB, as {signers} certified it{how}"
            )

    def contributors(self, head: "Digest") -> list[tuple[str, int]]:
        """As the first stage counts them, up to its head."""
        from dilocox_peer.peer.rounds.ledger import Ledger

        ranked = Ledger.of(self._surveys[0].annals.up_to(head)).ranked()
        return [(credit.peer, credit.micro_batches) for credit in ranked]

    def why_not(self, timeout_s: float) -> str:
        """In one line, after timeout_s without a model."""
        unserved = [str(survey.stage) for survey in self._surveys if not survey.is_served]
        if unserved:
            return f"nobody serves stage {', '.join(unserved)} of the run: a peer has to join it first"
        where = ", ".join(f"stage {survey.stage}: {survey.annals.place.round or 'none'}" for survey in self._surveys)
        return (
            f"no round of which all stages are served came within {timeout_s:g} s ({where}): "
            "try again with a longer --timeout"
        )

    def _hear(self, event: Event) -> None:
        if event.level == "warning":
            self._say(event.line())
