"""The chain of a stage that is trained elsewhere, in a log that grows with it, and in memory its newest certificates alone.

As a peer's own rounds.log (rounds/journal.py), without votes: a write costs what has come since the last one, and what is in blocks
beside the log is read when somebody asks for it. So neither memory nor a round's work grows with the run.
"""

import errno
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dilocox_peer.errors import ProtocolError
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.rounds.chain import Verifier
from dilocox_peer.peer.rounds.durable import Durable, Votes
from dilocox_peer.peer.rounds.genesis import genesis_of
from dilocox_peer.peer.rounds.journal import Journal, read_log
from dilocox_peer.peer.rounds.past import MOST_IN_BLOCK, Block
from dilocox_peer.peer.state.backup import Annals
from dilocox_peer.wire.chain import Certificate


class ChainLog:
    """Of one stage; one process owns the file. `annals` belongs to the event loop: there ask what is `unwritten`, have a thread `write` it,
    and `settle` what that gives back. trouble: what was wrong with the files now, "": nothing. may_lack: whether certificates may be missing
    for that, or for something earlier of which the damaged files are still here."""

    def __init__(self, path: Path, manifest: Manifest, stage: int, verify: Verifier) -> None:
        """Opens or makes the files, and verifies what they have. Blocking. Raises OSError; ConfigError where another version wrote them."""
        self._writing = threading.Lock()
        self._is_closed = False
        self._journal = Journal(path, genesis_of(manifest, stage))
        try:
            self.annals = Annals(manifest, stage, verify, store=self._journal.store)
            take_all(self.annals, self._journal.chain.certificates, self._journal.chain.blocks)
        except BaseException:
            self._journal.close()
            raise
        self.trouble = self._journal.damage
        if not self.trouble and (reason := self._journal.loaded.reason):
            self.trouble = f"{path} was cut short by a crash: {reason}"
        known, verified = self._journal.chain.height, self.annals.place.height
        if not self.trouble and verified < known:
            self.trouble = f"{path} has {known} certificates, of which {verified} verify"
        self.may_lack = bool(self.trouble or self._journal.kept_aside)
        self._journal.forget()

    def unwritten(self) -> Durable | None:
        """What the log lacks of the chain as it is now. None: nothing."""
        keep = self._journal.held_of(self.annals.height_of)
        if keep == self.annals.place.height == self._journal.height:
            return None
        return Durable(keep, tuple(self.annals.certificates[keep:]), Votes(self.annals.place.head))

    def write(self, growth: Durable) -> Sequence[Block]:
        """Blocking. Gives back the blocks that all older certificates are in, if more have gone into some. Raises OSError: the log is as
        it was."""
        with self._writing:
            if self._is_closed:
                raise OSError(errno.EBADF, "the log of a chain is closed")
            return self._journal.write(growth)

    def settle(self, blocks: Sequence[Block]) -> None:
        """What lies in these need not be in memory."""
        self.annals.seal(blocks)

    def close(self) -> None:
        """Blocking: a write that is under way is waited for."""
        with self._writing:
            self._is_closed = True
            self._journal.close()


def read_chain(path: Path, manifest: Manifest, stage: int, verify: Verifier) -> Annals:
    """What a log has that verifies; it is not opened for more. Blocking. Raises OSError."""
    annals = Annals(manifest, stage, verify)
    if (durable := read_log(path, genesis_of(manifest, stage)).durable) is not None:
        take_all(annals, durable.appended)
    return annals


def take_all(annals: Annals, certificates: Sequence[Certificate], blocks: Sequence[Block] = ()) -> None:
    """What verifies: of a log that was damaged its beginning is true. A block at a time, so that what lies on the disk is never all in memory."""
    with suppress(ProtocolError):
        for block in blocks:
            annals.take(certificates[block.first : block.stop])
            annals.seal([block])
        for start in range(blocks[-1].stop if blocks else 0, len(certificates), MOST_IN_BLOCK):
            annals.take(certificates[start : start + MOST_IN_BLOCK])
