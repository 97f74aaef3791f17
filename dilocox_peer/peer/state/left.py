"""Branches that this peer has left for better ones, kept on disk: nothing that was trained is gone without a way back.

    left/TIP/chain                  certificates from genesis on to the state's head
    left/TIP/checkpoints/anchor-N   the anchor state they led to
    left/TIP/previous.json          where it parted and what it was, for people

TIP is the beginning of the head's hash. A branch is there whole or not at all. `dilocox-peer recover` goes back to one.
"""

import json
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from dilocox_peer.errors import ProtocolError, StateCorrupt
from dilocox_peer.files import fsync_folder, replace_file
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.peer.planning.plan import plan_bounds
from dilocox_peer.peer.rounds.chain import Chain, Verifier
from dilocox_peer.peer.rounds.genesis import genesis_of
from dilocox_peer.peer.state.backup import MAX_CHAIN_BYTES, Backup
from dilocox_peer.peer.state.checkpoint import read_checkpoint, stored_checkpoints, write_checkpoint
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.types import RunId
from dilocox_peer.wire.chain import Certificate, chain_in_parts, decode_chain

MAX_KEPT = 3
TIP_CHARS = 16
_TIP = re.compile(f"[0-9a-f]{{{TIP_CHARS}}}")
_ABOUT, _PARTIAL = "previous.json", ".partial"


@dataclass(frozen=True, slots=True)
class LeftBranch:
    """One that is kept. first_round, last_round: of what it has and the chain that was taken instead had not."""

    tip: str
    stage: int
    first_round: int
    last_round: int
    left_at_s: float
    size_bytes: int


class LeftBranches:
    """Those of one run's folder. Blocking; one process owns the folder."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / "left"

    def sweep(self) -> None:
        """Removes what was being kept when a process was killed, which may be as large as a state."""
        for partial in self._folder.glob(f".*{_PARTIAL}"):
            shutil.rmtree(partial, ignore_errors=True)

    def keep(
        self,
        run_id: RunId,
        chain: Sequence[Certificate],
        leaves: Sequence[Certificate],
        state: AnchorState,
        *,
        spare: str = "",
        now_s: float | None = None,
    ) -> LeftBranch | None:
        """Keeps the branch of chain that ends with state, of which leaves are dropped; None if no round of work is lost with
        them. The oldest beyond MAX_KEPT goes, but not spare. Raises OSError."""
        worked = [each.value.round for each in leaves if each.value.entries and each.value.round <= state.round]
        if not worked or state.head not in {certificate.head for certificate in leaves}:
            return None
        stop = next(each.value.height for each in leaves if each.head == state.head)
        tip = state.head.hex()[:TIP_CHARS]
        self.sweep()
        partial = self._folder / f".{tip}{_PARTIAL}"
        partial.mkdir(mode=0o700, parents=True)
        write_checkpoint(partial / "checkpoints", run_id, state)
        left_at_s = time.time() if now_s is None else now_s
        about = {"stage": leaves[-1].stage, "rounds": [min(worked), max(worked)], "left_at_s": left_at_s}
        replace_file(partial / _ABOUT, [json.dumps(about).encode()], mode=0o600)
        replace_file(partial / "chain", chain_in_parts(islice(chain, stop), stop), mode=0o600)
        final = self._folder / tip
        shutil.rmtree(final, ignore_errors=True)
        partial.replace(final)
        fsync_folder(self._folder)
        kept = [each for each in self.found() if each.tip not in (tip, spare)]
        for old in kept[MAX_KEPT - 1 - bool(spare and spare != tip) :]:
            shutil.rmtree(self._folder / old.tip, ignore_errors=True)
        return next(each for each in self.found() if each.tip == tip)

    def found(self) -> list[LeftBranch]:
        """Those that are here, the newest first; what is no branch is left out."""
        try:
            names = [each.name for each in self._folder.iterdir() if _TIP.fullmatch(each.name)]
        except OSError:
            return []
        found = [each for name in names if (each := self._about(name)) is not None]
        return sorted(found, key=lambda each: (-each.left_at_s, each.tip))

    def _about(self, tip: str) -> LeftBranch | None:
        folder = self._folder / tip
        try:
            about = json.loads((folder / _ABOUT).read_bytes())
            first, last = about["rounds"]
            size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            return LeftBranch(tip, int(about["stage"]), int(first), int(last), float(about["left_at_s"]), size_bytes)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def load(self, branch: LeftBranch, manifest: Manifest, verify: Verifier) -> Backup:
        """The branch, its signatures verified again. Raises StateCorrupt when it is damaged, OSError."""
        folder = self._folder / branch.tip
        try:
            certificates = decode_chain((folder / "chain").read_bytes(), MAX_CHAIN_BYTES)
        except ProtocolError as error:
            raise StateCorrupt(f"the chain in {folder} is damaged: {error.reason}") from None
        chain = Chain(genesis_of(manifest, branch.stage))
        for certificate in certificates:
            if reason := chain.place.why_not_certificate(
                certificate, verify, manifest.limits.max_peers, plan_bounds(manifest)
            ):
                raise StateCorrupt(f"the chain in {folder} is damaged: {reason}")
            chain.append(certificate)
        for path in stored_checkpoints(folder / "checkpoints"):
            state = read_checkpoint(path, manifest.run_id, layout_of(manifest, branch.stage))
            if certificates and state.head == chain.head:
                return Backup(tuple(certificates), state)
        raise StateCorrupt(f"{folder} holds no state at the end of its chain")
