"""What a volunteer decides of a session."""

from dataclasses import dataclass, field
from pathlib import Path

from dilocox_peer.admission import Grant
from dilocox_peer.network.transport import TransportLimits
from dilocox_peer.peer.claim import Wish
from dilocox_peer.types import RunId


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Folders are of this peer alone; run_folder holds what survives a restart."""

    run_id: RunId
    initial_peers: tuple[str, ...]
    host_maddrs: tuple[str, ...]
    announce_maddrs: tuple[str, ...]
    runtime_dir: Path
    identity_path: Path
    run_folder: Path
    data: tuple[Path, ...]
    stage: int | None
    device: str
    threads: int
    limits: TransportLimits = field(default_factory=TransportLimits)
    link_maddrs: tuple[str, ...] = ()  # empty: like host_maddrs, at ports of the system's choice
    trace: bool = False
    outgoing_only: bool = False  # others cannot dial us
    mdns: bool = False  # look for neighbours' links on the local network
    max_memory_bytes: int | None = None  # None: as much as is free
    backup_stages: int = 1  # other stages of which a copy is kept
    grant: Grant | None = None  # the invitation in the link

    @property
    def wish(self) -> Wish:
        """Of a stage."""
        return Wish(self.stage, self.device, self.max_memory_bytes)
