"""A stage whose rounds three peers certify by hand, for tests of what others make of its chain."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from dilocox_peer.config import preset
from dilocox_peer.peer.planning.plan import plan_bounds
from dilocox_peer.peer.planning.planner import FixedPlanner
from dilocox_peer.peer.rounds.chain import vote_for
from dilocox_peer.peer.state.backup import Annals
from dilocox_peer.peer.state.backup_store import BackupStore
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.peer.training.outer import initial_state
from dilocox_peer.signing import SigningKey, verify
from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Entry, Report, Value, acceptance
from dilocox_peer.wire.directives import Directive

OWNER = SigningKey(bytes(32))
MANIFEST = preset("tiny", stages={"count": 2}, rounds={"total": 40, "inner_steps": 4}).signed_by(OWNER)
STAGE = 1
KEYS = {key.peer_id: key for key in (SigningKey(bytes([number]) * 32) for number in range(1, 4))}
ROSTER = tuple(KEYS)
NOTHING: Mapping[PeerId, Digest] = MappingProxyType({})


class CertifiedStage:
    """Of rounds 1, 2, ...: `states[height - 1]` is the state at `certificates[height - 1]`. first: chains of different ones differ, and one
    with a higher number was signed later."""

    def __init__(self, first: float = 1.0, stage: int = STAGE) -> None:
        self.stage = stage
        self._planner = FixedPlanner(plan_bounds(MANIFEST))
        self.place = Annals(MANIFEST, stage, verify).place
        self.certificates: list[Certificate] = []
        self.states: list[AnchorState] = []
        self.roster = ROSTER
        self._value = first
        self._order = int(1000 * first)
        self._append(self.place.view_change(ROSTER), view=1)

    def _append(self, value: Value, view: int) -> None:
        place = self.place
        message = acceptance(self.stage, place.head, view, 0, value)
        keys = {OWNER.peer_id: OWNER} if place.is_genesis else {peer: KEYS[peer] for peer in self.roster}
        signatures = tuple(
            (peer, vote_for(message, self._order + place.height, key.sign)) for peer, key in keys.items()
        )
        certificate = Certificate(self.stage, place.head, view, 0, value, signatures)
        self.certificates.append(certificate)
        self.place = self.place.then(certificate)
        self._value += 1.0
        zero = initial_state(MANIFEST, self.stage)
        raw = (self._value * zero.anchor_N()).numpy().tobytes()
        self.states.append(
            AnchorState.of(zero.layout, head=certificate.head, round_number=value.round, anchor=raw, momentum=raw)
        )

    def round(
        self,
        closed_ms: int = 0,
        blobs: Mapping[PeerId, Digest] = NOTHING,
        *,
        uplink_kbps: int = 0,
        directive: Directive | None = None,
    ) -> "CertifiedStage":
        """closed_ms: when, as all of them tell; uplink_kbps: so does each of its own. blobs: names of their contributions; that these are
        10 bytes they say."""
        digest, report = self.states[-1].digest, Report(closed_ms=closed_ms, uplink_kbps=uplink_kbps)
        entries = [
            Entry(peer, 1, blobs.get(peer, sha256(peer.encode())), 10, 4, digest, report) for peer in self.roster
        ]
        plan = self._planner.next(self.place.plan)
        self._append(self.place.round_value(entries, self.roster, plan, directive), self.place.view)
        return self

    def seized(self, *roster: PeerId) -> "CertifiedStage":
        """These write a view change without asking the others, and certify alone from here on."""
        self.roster = roster
        self._append(self.place.view_change(roster), self.place.view + 1)
        return self

    def rounds(self, count: int) -> "CertifiedStage":
        for _ in range(count):
            self.round()
        return self


def keep_in(store: BackupStore, certificates: Sequence[Certificate], state: AnchorState | None = None) -> Annals:
    """As a guardian does: the chain, and the state if there is one."""
    annals = store.open()
    try:
        annals.take(certificates)
        growth = store.unwritten()
        if state is not None:
            store.settle(store.save(state, growth))
        elif growth is not None:
            store.settle(store.write_chain(growth))
    finally:
        store.close()
    return annals


def annals_of(certificates: Sequence[Certificate]) -> Annals:
    annals = Annals(MANIFEST, STAGE, verify)
    annals.take(certificates)
    return annals
