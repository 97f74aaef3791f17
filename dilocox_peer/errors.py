"""One class for each thing the caller does next. Every message is one line that names the thing and the remedy."""

import errno
import os
import socket

from dilocox_peer.types import PeerId


class DilocoxError(Exception):
    """Root. `exit_code` is what the command line ends with when nobody handles it."""

    exit_code = 1
    during = ""  # what it ended, such as a step of a start-up; set where that is known

    @property
    def line(self) -> str:
        """What the command line says."""
        return f"{self.during}: {self}" if self.during else str(self)


class ConfigError(DilocoxError):
    """The user's input is wrong: say what and how to mend it, exit 2."""

    exit_code = 2


class DiskTakesNothing(DilocoxError):
    """A disk is full or read-only, which may pass by itself: try again later, exit 5."""

    exit_code = 5


class LackedForNow(DilocoxError):
    """What is not here now, and may be by itself later (memory that others hold, a busy machine, a place in the run): try again, exit 1."""


_DISK_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or have the quota raised",
    errno.EROFS: "mount it writable again",
    errno.EIO: "look at the disk",
}


class RunUnreachable(DilocoxError):
    """No peer of the run answers: try again later or elsewhere, exit 3."""

    exit_code = 3


class RunRefused(DilocoxError):
    """The run exists and refuses us (or we refuse it), exit 4."""

    exit_code = 4


class ManifestMismatch(RunRefused):
    """A manifest that is not what its run id or its owner's signature says."""


class ProtocolError(DilocoxError):
    """A peer broke the protocol: drop what it sent; repeated, ban it."""

    def __init__(self, peer: PeerId | None, reason: str) -> None:
        super().__init__(f"{peer or 'a peer'}: {reason}")
        self.peer = peer
        self.reason = reason


class MalformedBlob(DilocoxError):
    """Bytes that are no valid contribution for this stage, with the reason; nothing was decoded."""


class PeerUnavailable(DilocoxError):
    """A peer does not answer: ask another one."""

    def __init__(self, peer: PeerId, reason: str) -> None:
        super().__init__(f"{peer} does not answer: {reason}")
        self.peer = peer
        self.reason = reason


class ThingUnavailable(DilocoxError):
    """None of the peers asked gives a thing of this name: ask others, or later."""


class StateCorrupt(DilocoxError):
    """State on disk or from a donor whose digest is not the announced one; it was not used."""


def disk_remedy(error: OSError) -> str:
    """What to do about a disk that takes nothing now, though it may by itself later; "" where something else is wrong."""
    return _DISK_REMEDIES.get(error.errno or 0, "")


def first_failure(error: BaseException) -> BaseException:
    """Of tasks that belong together the first one's; of a group nobody reads what it was."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def not_written(what: str, error: OSError, remedy: str = "") -> DilocoxError:
    """To be raised: a DiskTakesNothing where the disk takes nothing now, else a ConfigError with the remedy. what: could not be written, and that
    it could not."""
    if now := disk_remedy(error):
        return DiskTakesNothing(f"{what}: {error.strerror}; {now}")
    return ConfigError(f"{what}: {error.strerror or error}" + (f"; {remedy}" if remedy else ""))


def not_started(program: str, error: OSError, remedy: str) -> DilocoxError:
    """To be raised: a LackedForNow where the machine has no room for another process, else a ConfigError with the remedy."""
    if error.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        return LackedForNow(f"{program} did not start: {error}; try again when the machine has less to do")
    return ConfigError(f"{program} did not start: {error}; {remedy}")


def why_not_bound(error: OSError | UnicodeError) -> str:
    """Why nobody can listen there, in the system's words alone: socket and asyncio put the address around them once more."""
    if isinstance(error, UnicodeError):  # of a name too long for a host
        return "no such host"
    if isinstance(error, socket.gaierror) or not error.errno:  # its numbers are not the system's
        return (error.strerror or str(error)).lower()
    return os.strerror(error.errno).lower()
