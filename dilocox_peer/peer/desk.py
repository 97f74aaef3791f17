"""Where invitations are redeemed: the part of a bootstrap that holds the run owner's key. And the owner's records on disk.

The records lie in the owner's home, a folder a run: `revocations` and `directive`, which `dilocox-peer revoke` and `owner` write
and a bootstrap reads again and again; `redeemed`, a line for each use of an invitation for many, on disk before the pass is handed out. One process
at a time counts: another that opens `redeemed` is refused.
"""

import asyncio
import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dilocox_peer.admission import MAX_TIME_MS, Admission, Gate, Grant, PassMaker, Revocations
from dilocox_peer.dht.directory import Directory
from dilocox_peer.errors import ConfigError, PeerUnavailable, not_written
from dilocox_peer.files import replace_file
from dilocox_peer.network.transport import Reply, Transport
from dilocox_peer.peer.entry import ADMIT_SERVICE
from dilocox_peer.signing import SigningKey, verify
from dilocox_peer.types import Digest, PeerId, RunId
from dilocox_peer.wire.directives import (
    MAX_DIRECTIVE_BYTES,
    Directive,
    newest_first,
    read_directive,
    why_not_directive,
)
from dilocox_peer.wire.records import MAX_GRANT_BYTES, MAX_REVOCATIONS_BYTES


def open_folder(folder: Path) -> None:
    """Makes the records' folder, in the owner's home, for whom that home belongs to: root may say something at the home of a service, whose bootstrap is
    another user. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.geteuid() != 0:
        return
    home = folder.parent.parent.stat()
    for each in (folder.parent, folder):
        if each.lstat().st_uid != home.st_uid:  # nor by a link that this user has put there
            os.chown(each, home.st_uid, home.st_gid, follow_symlinks=False)


_REMEDY = "see that it is in a folder of yours, with rights for you, or pass another --home"
_REDEEMED = re.compile(r"([0-9a-f]{32}) ([1-9A-HJ-NP-Za-km-z]{46,64})")


class OwnerRecords:
    """What a run's owner keeps of invitations, in a folder of the run."""

    def __init__(self, home: Path, run_id: RunId) -> None:
        """home: the owner's, where its key is by default."""
        self.folder = home / "admission" / run_id[:16]
        self._revocations = self.folder / "revocations"
        self._redeemed = self.folder / "redeemed"
        self._directive = self.folder / "directive"
        self._issued = self.folder / "issued"

    def revocations(self, *, run_id: RunId, owner: PeerId) -> Revocations:
        """Empty if nothing was revoked yet. Raises ConfigError when what is there cannot be read or is not the owner's."""
        try:
            with self._revocations.open("rb") as file:
                raw = file.read(MAX_REVOCATIONS_BYTES + 1)
        except FileNotFoundError:
            return Revocations(run_id, 0, ())
        except OSError as error:
            raise ConfigError(f"{self._revocations} cannot be read: {error.strerror}; {_REMEDY}") from None
        try:
            return Revocations.from_bytes(raw, run_id=run_id, owner=owner)
        except ValueError as error:
            raise ConfigError(f"{self._revocations} is {error}: move it away, and revoke again") from None

    def write_revocations(self, revocations: Revocations) -> None:
        """The file is the old one or the new one, never a part. Raises ConfigError, DiskTakesNothing."""
        try:
            open_folder(self.folder)
            # No secret; the bootstrap may run as another user than the one who revokes.
            replace_file(self._revocations, [revocations.to_bytes()])
        except OSError as error:
            raise not_written(f"{self._revocations} cannot be written", error, _REMEDY) from None

    def newest_issued_ms(self) -> int:
        """When the newest invitation was issued, by the clock of then; 0 where nobody says."""
        try:
            return min(int(self._issued.read_bytes()[:20]), MAX_TIME_MS)
        except (OSError, ValueError):
            return 0

    def note_issued(self, issued_ms: int) -> None:
        """A peer that is put out is put out of what was issued until then, also by a clock that was ahead. Raises ConfigError, DiskTakesNothing."""
        if issued_ms <= self.newest_issued_ms():
            return
        try:
            open_folder(self.folder)
            replace_file(self._issued, [b"%d\n" % issued_ms])
        except OSError as error:
            raise not_written(f"{self._issued} cannot be written", error, _REMEDY) from None

    def directive(self, *, run: Digest, owner: PeerId) -> Directive | None:
        """None if none was signed yet. Raises ConfigError when what is there cannot be read or is not the owner's."""
        try:
            with self._directive.open("rb") as file:
                raw = file.read(MAX_DIRECTIVE_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{self._directive} cannot be read: {error.strerror}; {_REMEDY}") from None
        try:
            directive = read_directive(raw)
            if reason := why_not_directive(directive, run=run, owner=owner, verify=verify):
                raise ValueError(reason)
        except ValueError as error:
            raise ConfigError(f"{self._directive} is no directive ({error}): move it away, and say it again") from None
        return directive

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else writes a directive meanwhile: what was read within is what is replaced. Raises ConfigError, DiskTakesNothing."""
        try:
            open_folder(self.folder)
            held = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise not_written(f"{self.folder} cannot be used", error, _REMEDY) from None
        try:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another process writes into {self.folder} just now: try again") from None
            except OSError:
                # A file system without locks: two words in one moment are settled as those of two places are.
                pass
            yield
        finally:
            os.close(held)

    def take_directive(self, directive: Directive, owner: PeerId) -> bool:
        """Writes what was said elsewhere, unless what lies there counts before it; whether it was written. Raises ConfigError, DiskTakesNothing."""
        with self.alone():
            known = self.directive(run=directive.run, owner=owner)
            if known is not None and newest_first((known, directive))[0] == known:
                return False
            self.write_directive(directive)
            return True

    def write_directive(self, directive: Directive) -> None:
        """As write_revocations; within `alone`."""
        try:
            open_folder(self.folder)
            replace_file(self._directive, [directive.to_bytes()])
        except OSError as error:
            raise not_written(f"{self._directive} cannot be written", error, _REMEDY) from None

    def open_redeemed(self) -> "Redeemed":
        """Raises ConfigError when it cannot be used, or another process uses it."""
        return Redeemed(self._redeemed)


class Redeemed:
    """The open file of uses. `used` is what was there; `add` appends. Close it."""

    def __init__(self, path: Path) -> None:
        try:
            open_folder(path.parent)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                text = path.read_text(encoding="ascii", errors="replace")
                if text and not text.endswith("\n"):  # cut short by a power cut: its pass was never handed out
                    os.write(self._fd, b"\n")
            except BaseException:
                os.close(self._fd)
                raise
        except BlockingIOError:
            raise ConfigError(
                f"{path} is in use: another bootstrap redeems this run's invitations; give the owner's key to one alone"
            ) from None
        except OSError as error:
            raise not_written(f"{path} cannot be used", error, _REMEDY) from None
        self.used: dict[bytes, set[PeerId]] = {}
        for line in text.split("\n")[:-1]:
            if (found := _REDEEMED.fullmatch(line)) is not None:
                self.used.setdefault(bytes.fromhex(found[1]), set()).add(PeerId(found[2]))

    def add(self, grant_id: bytes, peer: PeerId) -> None:
        """On disk when it returns. Raises OSError."""
        line = f"{grant_id.hex()} {peer}\n".encode("ascii")
        size_bytes = os.fstat(self._fd).st_size
        try:
            if os.write(self._fd, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._fd)
        except OSError:
            with suppress(OSError):  # half a line would count for nobody
                os.ftruncate(self._fd, size_bytes)
            raise

    def close(self) -> None:
        os.close(self._fd)


class Desk:
    """Of one run that is not open, at a bootstrap. `open`, `serve`, `beat` now and then, `close`."""

    def __init__(
        self, gate: Gate, records: OwnerRecords, registrar: PassMaker | None, redeemed: Redeemed | None
    ) -> None:
        self.gate = gate
        self._records = records
        self.registrar = registrar
        self.redeemed = redeemed
        self._counting = threading.Lock()

    @classmethod
    def open(cls, gate: Gate, records: OwnerRecords, owner_key: SigningKey | None) -> "Desk":
        """owner_key: None leaves redeeming to another bootstrap. Raises ConfigError."""
        gate.take(records.revocations(run_id=gate.run_id, owner=gate.owner))
        if owner_key is None:
            return cls(gate, records, None, None)
        redeemed = records.open_redeemed()
        return cls(gate, records, PassMaker(gate, owner_key, redeemed.used), redeemed)

    def close(self) -> None:
        if self.redeemed is not None:
            self.redeemed.close()

    @property
    def can_redeem(self) -> bool:
        return self.registrar is not None

    def admission_of(self, peer: PeerId) -> Admission | None:
        """With which the bootstrap itself may ask the run's peers; None without the owner's key."""
        if self.registrar is None:
            return None
        own = self.registrar.own_pass(peer, time.time())
        self.gate.show(peer, own.to_bytes(), time.time())
        return Admission(self.gate, own.to_bytes())

    async def serve(self, transport: Transport) -> None:
        """Answers who brings an invitation, from here on."""
        if self.registrar is not None:
            await transport.serve(ADMIT_SERVICE, self.admit, right=None)

    async def beat(self, directory: Directory) -> None:
        """Reads again what the owner has revoked, here or from elsewhere, and sees that the directory has the newest list.

        Raises ConfigError, DiskTakesNothing, RunUnreachable.
        """
        records, gate = self._records, self.gate
        own = await asyncio.to_thread(records.revocations, run_id=gate.run_id, owner=gate.owner)
        gate.take(own)
        found = await directory.fetch_revocations()
        if found is not None and self.registrar is not None:  # each written where the other was not known yet
            with suppress(ValueError):
                found = self.registrar.joined(own, found)
        if found is not None and gate.take(found) and found.covers(own):
            await asyncio.to_thread(records.write_revocations, found)
        if gate.revocations.entries:
            await directory.publish_revocations(gate.revocations)

    async def admit(self, peer: PeerId, header: dict[str, Any]) -> Reply:
        """A refusal of an invitation is an answer: a RequestRefused would read as a bootstrap that cannot redeem."""
        assert self.registrar is not None
        assert self.redeemed is not None
        try:
            match header:
                case {"grant": bytes(raw)} if len(raw) <= MAX_GRANT_BYTES:
                    grant = Grant.from_bytes(raw)
                case _:
                    raise ValueError("no invitation in the request")
        except ValueError as error:
            return Reply({"refused": str(error)})
        return await asyncio.to_thread(self._use, grant, peer)

    def _use(self, grant: Grant, peer: PeerId) -> Reply:
        """In a thread of its own, and never in two at once: what is asked, written and counted belongs together, also when
        nobody waits for the answer any more."""
        assert self.registrar is not None
        assert self.redeemed is not None
        gate = self.gate
        with self._counting:
            with suppress(ConfigError):  # the beat tells it; what was read before still holds
                gate.take(self._records.revocations(run_id=gate.run_id, owner=gate.owner))
            reason = self.registrar.refusal(grant, peer, time.time())
            if reason is not None:
                return Reply({"refused": reason})
            if self.registrar.is_new(grant, peer):
                try:
                    self.redeemed.add(grant.grant_id, peer)
                except OSError as error:
                    raise PeerUnavailable(peer, f"its use could not be written down: {error.strerror}") from None
            return Reply({"pass": self.registrar.redeem(grant, peer).to_bytes()})
