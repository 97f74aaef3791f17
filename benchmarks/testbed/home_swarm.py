"""A run whose bootstrap and peers are machines of a natlab: real processes behind real routers, and every event they tell."""

import asyncio
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from testbed.natlab import NatLab

from dilocox_peer.cli.children import Child, Children
from dilocox_peer.cli.init import write_whole
from dilocox_peer.config import to_toml
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.identity import Identity

BOOTSTRAP = "boot"
START_S = 120.0


@dataclass
class Told:
    """What one process tells. at_s: monotonic, when the line was read."""

    events: list[tuple[float, dict[str, Any]]] = field(default_factory=list)

    def of(self, kind: str) -> list[tuple[float, dict[str, Any]]]:
        return [(at_s, record) for at_s, record in self.events if record["event"] == kind]

    @property
    def peer(self) -> str | None:
        return next((record["peer"] for _, record in self.of("PeerStarted")), None)


class HomeSwarm:
    """`async with HomeSwarm(lab, manifest) as swarm`, in a lab that has everybody and was started."""

    def __init__(self, lab: NatLab, manifest: Manifest) -> None:
        self.lab = lab
        self.told: dict[str, Told] = defaultdict(Told)
        self.link = ""
        self.folder = Path(tempfile.mkdtemp(prefix="dilocox-homes-"))
        with Identity.open(self.folder / "boot" / "owner.key") as owner:
            self.manifest = manifest.signed_by(owner.key)
        self._children = Children(self._take)
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        try:
            await self._children.stop()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    async def start_bootstrap(
        self,
        host: str = "31.0.0.9",
        ports: Sequence[int] = (4711,),
        more: Sequence[str] = (),
        host_6: str | None = None,
    ) -> Child:
        """At the public host BOOTSTRAP, at host_6 too, with the owner's key; returns when its link is there."""
        run_file = self.folder / "run.toml"
        write_whole(run_file, to_toml(self.manifest).encode())
        self.link = ""
        ends = [("/ip4/0.0.0.0", f"/ip4/{host}")] + ([("/ip6/::", f"/ip6/{host_6}")] if host_6 is not None else [])
        where = [
            flag
            for port in ports
            for own, outside in ends
            for flag in ("--host-maddrs", f"{own}/tcp/{port}", "--announce-maddrs", f"{outside}/tcp/{port}")
        ]
        child = await self._start(BOOTSTRAP, ["bootstrap", str(run_file), *where, *more])
        await self.until(lambda: bool(self.link), START_S)
        return child

    async def join(
        self, name: str, *more: str, at: str | None = None, program: Sequence[str] = ("-m", "dilocox_peer")
    ) -> Child:
        """`dilocox-peer join LINK` at the machine `at`, else of that name. program: as Children.start."""
        return await self._start(name, ["join", self.link, "--name", name, *more], at=at or name, program=program)

    async def _start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        at: str | None = None,
        program: Sequence[str] = ("-m", "dilocox_peer"),
    ) -> Child:
        prefix = self.lab.command(at or name, ["env", "OMP_NUM_THREADS=1"])
        home = self.folder / name
        return await self._children.start(name, [*arguments, "--home", str(home)], program=program, prefix=prefix)

    def child(self, name: str) -> Child:
        return self._children[name]

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Whether the condition, asked after every event, came to hold."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def rounds(self, name: str) -> list[tuple[float, dict[str, Any]]]:
        """The rounds that a peer knows certified, each when it was told."""
        return self.told[name].of("RoundCertified")

    def names(self) -> dict[str, str]:
        """PeerID -> name of those that have started."""
        return {told.peer: name for name, told in self.told.items() if told.peer is not None}

    def _take(self, label: str, record: dict[str, Any]) -> None:
        if record["event"] == "BootstrapReady":
            self.link = record["link"]
        self.told[label].events.append((time.monotonic(), record))
        self._changed.set()
