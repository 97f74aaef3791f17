"""What the directory says of us: the lease of our stage, written when we come and again before it runs out.

What it says of others is read by claim.py and discovery.py.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from dilocox_peer.admission import Admission
from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import PROTOCOL_VERSION, Lease
from dilocox_peer.errors import RunUnreachable
from dilocox_peer.events import Failed, Listener
from dilocox_peer.invitation import address_range, parse_multiaddr, visible_at
from dilocox_peer.manifest import Manifest
from dilocox_peer.network.endpoint import Endpoint
from dilocox_peer.network.port_lease import OpenPort
from dilocox_peer.network.port_opener import PortOpener
from dilocox_peer.network.reservations import Reservations
from dilocox_peer.network.transport import Transport
from dilocox_peer.peer.dialback import DialbackVerdict
from dilocox_peer.peer.links.conveyor import Conveyor
from dilocox_peer.peer.pauses import Pauses
from dilocox_peer.peer.training.book import Progress
from dilocox_peer.types import PeerId
from dilocox_peer.wire.records import MAX_ADDRESSES

LEASE_S = 30.0


@dataclass(frozen=True)
class Presence:
    """This peer's identity and place on the network, from one start of its network to the next."""

    me: PeerId
    incarnation: int
    transport: Transport
    reachability: DialbackVerdict
    admission: Admission | None = None  # of a run that is not open
    reservations: Reservations | None = None  # None: others reach us directly or not at all
    ports: PortOpener | None = None
    public_name: str = ""
    site: str = ""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others dial us, those that are of use to most of them first: a lease holds a few."""
        own, is_direct = self.transport.addresses, self.reachability.is_known_direct
        if self.reservations is not None and not is_direct:
            # Where a router sends us out nobody gets in by dialling: p2pd punches there, if nobody has knocked alone.
            outside = self.reachability.outside.hosts
            own = tuple(text for text in own if parse_multiaddr(text, "lease").host not in outside)
        public = [text for text in own if address_range(parse_multiaddr(text, "lease").host)]
        inside = (text for text in own if text not in public)
        # A home with IPv6 has more addresses than a lease holds, and by none of them may anybody come in.
        relays = self.addresses_of_relays
        return (*public, *relays, *inside) if is_direct else (*relays, *public, *inside)

    @property
    def addresses_of_relays(self) -> tuple[str, ...]:
        return () if self.reservations is None else self.reservations.addresses

    @property
    def has_relays(self) -> bool:
        """Whether some will pass others on to us, which others may not know yet."""
        return self.reservations is not None and bool(self.reservations.held)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.me, self.incarnation, self.transport)

    @property
    def is_dialable(self) -> bool:
        """Whether others may count on dialling us, through a relay if need be; it can change with our addresses."""
        if self.reachability.at(self.transport.addresses) == "direct":
            return True
        return self.has_relays and not self.reachability.is_outgoing_only

    def lease(self, stage: int) -> Lease:
        """Of a peer that is at that stage and has done nothing there yet."""
        return Lease(
            peer=self.me,
            stage=stage,
            incarnation=self.incarnation,
            addresses=self.addresses,
            protocol=PROTOCOL_VERSION,
            tokens_per_s=0.0,
            memory_bytes=0,
            reachability=self.reachability.at(self.transport.addresses),
            round=0,
            admission=b"" if self.admission is None else self.admission.own_pass,
            public_name=self.public_name,
            site=self.site,
        )


class Tenure:
    """Our lease of the stage that we train: it says how fast, how far, and where its links are to be had."""

    def __init__(
        self,
        presence: Presence,
        stage: int,
        *,
        directory: Directory,
        manifest: Manifest,
        progress: Callable[[], Progress],
        conveyor: Conveyor | None,
        pauses: Pauses,
        is_leader: Callable[[], bool],
        listener: Listener,
    ) -> None:
        """conveyor: of a run with several stages. is_leader: whether it is on us to keep the manifest in the directory."""
        self._presence = presence
        self._stage = stage
        self._directory = directory
        self._manifest = manifest
        self._progress = progress
        self._conveyor = conveyor
        self._pauses = pauses
        self._is_leader = is_leader
        self._listener = listener

    async def announce(self) -> None:
        """Writes the lease as of now. Raises RunUnreachable."""
        await self._directory.announce(self._lease())

    async def renew(self) -> None:
        """Announces again and again until cancelled; what fails is told and tried again."""
        while True:
            await self._until_due()
            try:
                await self.announce()
                if self._is_leader():  # one of the stage keeps alive what a bootstrap that is gone would have
                    await self._directory.publish_manifest(self._manifest)
                    admission = self._presence.admission
                    if admission is not None and admission.gate.revocations.entries:
                        await self._directory.publish_revocations(admission.gate.revocations)
            except RunUnreachable as error:
                self._listener(Failed("lease", f"{error}; trying again in {LEASE_S:.0f} s"))

    async def _until_due(self) -> None:
        """Before the lease runs out, once it names relays that are not ours any more, and when training is paused or goes on."""
        changed = [self._pauses.changed, self._presence.reachability.changed]
        if self._presence.reservations is not None:
            changed.append(self._presence.reservations.changed)
        if self._presence.ports is not None:
            changed.append(self._presence.ports.changed)
        waits = {asyncio.ensure_future(event.wait()) for event in changed}
        try:
            await asyncio.wait(waits, timeout=LEASE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        for event in changed:
            event.clear()

    def _lease(self) -> Lease:
        progress = self._progress()
        is_paused = self._pauses.is_paused
        lease = replace(
            self._presence.lease(self._stage),
            tokens_per_s=0.0 if is_paused else progress.tokens_per_s,
            round=progress.round,
            is_paused=is_paused,
        )
        if self._conveyor is None:
            return lease
        opened = None if self._presence.ports is None else self._presence.ports.port
        visible = links_at(self._conveyor, lease.addresses, opened)
        told = [text for text in visible if text not in self._presence.reachability.closed_links]
        return replace(lease, link=PeerId(self._conveyor.link_id), link_addresses=tuple(told[:MAX_ADDRESSES]))


def links_at(conveyor: Conveyor, seen_at: Iterable[str], opened: OpenPort | None) -> tuple[str, ...]:
    """Where others may dial our linkd, the port that a router opened for it first. seen_at: as visible_at."""
    link = PeerId(conveyor.link_id)
    visible = visible_at(conveyor.addresses, seen_at, link)
    if opened is None:
        return visible
    there = f"/ip4/{opened.host}/tcp/{opened.port}/p2p/{link}"
    return (there, *(text for text in visible if text != there))
