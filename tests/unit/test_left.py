"""Branches that a peer has left: whole on disk or not there, few of them, and the way back."""

from pathlib import Path

import pytest

from dilocox_peer.cli.flags import RecoverFlags
from dilocox_peer.cli.home import PeerHome
from dilocox_peer.cli.recover import run_recover
from dilocox_peer.errors import ConfigError, StateCorrupt
from dilocox_peer.peer.identity import Identity, encode_key
from dilocox_peer.peer.state.backup import Backup
from dilocox_peer.peer.state.keeper import Keeper
from dilocox_peer.peer.state.left import MAX_KEPT, LeftBranches
from dilocox_peer.signing import verify
from dilocox_peer.wire.checkpoints import sign_checkpoint
from tests.certified_stage import MANIFEST, OWNER, STAGE, CertifiedStage

RUN = MANIFEST.run_id


def keep(branches: LeftBranches, stage: CertifiedStage, *, shared: int = 2, now_s: float = 1.0):
    return branches.keep(RUN, stage.certificates, stage.certificates[shared:], stage.states[-1], now_s=now_s)


def test_a_branch_is_kept_with_its_state_and_read_back_verified(tmp_path: Path):
    stage, branches = CertifiedStage().rounds(4), LeftBranches(tmp_path)
    kept = keep(branches, stage)
    assert (kept.first_round, kept.last_round, kept.stage) == (2, 4, STAGE)
    assert branches.found() == [kept]
    backup = branches.load(kept, MANIFEST, verify)
    assert backup == Backup(tuple(stage.certificates), stage.states[-1])


def test_what_was_not_worked_for_is_not_kept(tmp_path: Path):
    stage, branches = CertifiedStage().rounds(2), LeftBranches(tmp_path)
    view_change_alone = stage.certificates[:1]
    assert branches.keep(RUN, view_change_alone, view_change_alone, stage.states[0]) is None
    not_merged_yet = stage.states[0]
    assert branches.keep(RUN, stage.certificates, stage.certificates[2:], not_merged_yet) is None
    assert branches.found() == []


def test_the_oldest_goes(tmp_path: Path):
    branches = LeftBranches(tmp_path)
    tips = [keep(branches, CertifiedStage(first=each).rounds(3), now_s=each).tip for each in (2.0, 3.0, 4.0, 5.0, 6.0)]
    assert [each.tip for each in branches.found()] == tips[: -MAX_KEPT - 1 : -1]


def test_what_a_killed_process_was_keeping_is_removed_at_the_next_start(tmp_path: Path):
    """It is as large as a state, and only the very same branch would have taken its place."""
    half = tmp_path / "left" / ".0123456789abcdef.partial" / "checkpoints"
    half.mkdir(parents=True)
    (half / "anchor").write_bytes(bytes(1000))
    keeper = Keeper(tmp_path, MANIFEST, STAGE, lambda _event: None)
    keeper.close()
    assert list((tmp_path / "left").iterdir()) == []


def test_half_a_branch_is_none_and_a_damaged_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stage, branches = CertifiedStage().rounds(3), LeftBranches(tmp_path)

    def killed(_certificates: object, _count: int) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("dilocox_peer.peer.state.left.chain_in_parts", killed)
        with pytest.raises(KeyboardInterrupt):
            keep(branches, stage)
    assert branches.found() == []
    kept = keep(branches, stage)
    chain = tmp_path / "left" / kept.tip / "chain"
    whole = chain.read_bytes()
    for length in range(0, len(whole), 97):
        chain.write_bytes(whole[:length])
        with pytest.raises(StateCorrupt):
            branches.load(kept, MANIFEST, verify)
    (tmp_path / "left" / kept.tip / "previous.json").write_bytes(b"[" * 9999)
    assert branches.found() == []


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> PeerHome:
    """Of a peer that is at round 5 of one branch and has left another at round 3."""
    home = PeerHome.at(tmp_path, "me", None)
    home.make()
    left, here = CertifiedStage(first=1.0).rounds(3), CertifiedStage(first=2.0).rounds(5)
    with Identity.open(home.identity_path) as identity:
        me = identity.peer_id
    keeper = Keeper(home.run_folder(RUN), MANIFEST, STAGE, lambda _event: None)
    keeper.adopt(Backup(tuple(here.certificates), here.states[-1]), me=me)
    keeper.close()
    assert keep(LeftBranches(home.run_folder(RUN)), left, shared=1) is not None
    return home


def recover(home: PeerHome, tip: str | None = None, owner_key: Path | None = None) -> list[str]:
    said: list[str] = []
    run_recover(
        RecoverFlags(tip=tip, name=home.folder.name, home=home.folder.parent.parent, owner_key=owner_key), said.append
    )
    return said


def present(home: PeerHome) -> Keeper:
    keeper = Keeper(home.run_folder(RUN), MANIFEST, STAGE, lambda _event: None)
    keeper.close()
    return keeper


def test_without_a_tip_it_lists(home: PeerHome):
    [line] = recover(home)
    assert "rounds 1-3" in line
    assert f"stage {STAGE}" in line
    assert present(home).state.round == 5


def test_with_one_chain_and_state_are_back_and_the_present_is_kept(home: PeerHome):
    left = CertifiedStage(first=1.0).rounds(3)
    tip = recover(home)[0].split()[0]
    said = " ".join(recover(home, tip[:6]))
    assert "back at round 3" in said
    assert "unless the owner signs" in said
    keeper = present(home)
    assert keeper.state == left.states[-1]
    assert keeper.durable is not None
    assert keeper.durable.appended == tuple(left.certificates)
    assert keeper.durable.checkpoint is None
    other = next(line.split()[0] for line in recover(home) if not line.startswith(tip))
    recover(home, other)
    assert present(home).state.round == 5, "and forth again"


def test_with_the_owners_key_the_branch_is_vouched_for(home: PeerHome, tmp_path: Path):
    key = tmp_path / "the.key"
    key.write_bytes(encode_key(bytes(32)))
    key.chmod(0o600)
    recover(home, recover(home)[0].split()[0], key)
    durable = present(home).durable
    assert durable is not None
    checkpoint = durable.checkpoint
    assert checkpoint is not None
    assert (checkpoint.round, checkpoint.is_last) == (3, False)
    assert checkpoint == sign_checkpoint(checkpoint, OWNER.sign)
    assert checkpoint.head == present(home).state.head


def test_what_cannot_be_recovered_is_one_clear_error(home: PeerHome, tmp_path: Path):
    with pytest.raises(ConfigError, match="no branch of this peer begins with"):
        recover(home, "ffff" * 4)
    wrong = tmp_path / "wrong.key"
    wrong.write_bytes(encode_key(b"w" * 32))
    wrong.chmod(0o600)
    tip = recover(home)[0].split()[0]
    with pytest.raises(ConfigError, match="has not signed"):
        recover(home, tip, wrong)
    with Identity.open(home.identity_path), pytest.raises(ConfigError, match="in use"):
        recover(home, tip)
    assert present(home).state.round == 5
