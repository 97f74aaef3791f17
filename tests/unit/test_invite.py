"""`invite` and `revoke` on a computer whose clock was set right between the two, and on a disk that takes nothing."""

import errno
import os
import time
from pathlib import Path

import pytest

from dilocox_peer.admission import Gate, Right
from dilocox_peer.cli.flags import AdmissionMode, InitFlags
from dilocox_peer.cli.flags_of_owner import InviteFlags, RevokeFlags
from dilocox_peer.cli.init import write_run_file
from dilocox_peer.cli.invite import run_invite, run_revoke
from dilocox_peer.config import read_signed_manifest
from dilocox_peer.errors import ConfigError, DiskTakesNothing
from dilocox_peer.invitation import parse_invitation
from dilocox_peer.peer.desk import OwnerRecords
from dilocox_peer.signing import SigningKey

TWO_DAYS_S = 2 * 86_400
PEER = SigningKey(b"p" * 32).peer_id


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    write_run_file(InitFlags(path=path, home=tmp_path, admission=AdmissionMode.INVITE))
    return path


def test_who_was_put_out_while_the_clock_was_ahead_can_be_invited_again(run_file, tmp_path, monkeypatch, capsys):
    """The invitation was worth nothing for as long as the clock had been ahead, and said that it is good."""
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + TWO_DAYS_S)
    run_revoke(RevokeFlags(path=run_file, target=PEER, home=tmp_path))
    monkeypatch.setattr(time, "time", right)
    capsys.readouterr()
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"
    run_invite(InviteFlags(path=run_file, for_peer=PEER, address=(address,), home=tmp_path))
    grant = parse_invitation(capsys.readouterr().out.strip()).grant
    assert grant is not None
    manifest = read_signed_manifest(run_file)
    gate = Gate.of(manifest)
    assert gate is not None
    gate.take(OwnerRecords(tmp_path, manifest.run_id).revocations(run_id=manifest.run_id, owner=gate.owner))
    assert gate.why_not(grant, PEER, Right.JOIN, time.time(), check_signature=True) is None
    assert grant.expires_s < time.time() + 31 * 86_400


@pytest.mark.parametrize("uses", [None, 3])
def test_who_was_invited_while_the_clock_was_ahead_can_be_put_out(run_file, tmp_path, monkeypatch, capsys, uses):
    """`revoke PEERID` said that it did, and the invitation was good for as long as the clock had been ahead."""
    right = time.time
    address = (f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}",)
    whom = {"for_peer": PEER} if uses is None else {"uses": uses}

    def invited():
        capsys.readouterr()
        run_invite(InviteFlags(path=run_file, address=address, home=tmp_path, **whom))
        return parse_invitation(capsys.readouterr().out.strip()).grant

    monkeypatch.setattr(time, "time", lambda: right() + TWO_DAYS_S)
    before = invited()
    monkeypatch.setattr(time, "time", right)
    run_revoke(RevokeFlags(path=run_file, target=PEER, home=tmp_path))
    manifest = read_signed_manifest(run_file)
    gate = Gate.of(manifest)
    assert gate is not None
    gate.take(OwnerRecords(tmp_path, manifest.run_id).revocations(run_id=manifest.run_id, owner=gate.owner))
    assert gate.why_not(before, PEER, Right.JOIN, time.time()) == "it was put out by the run's owner"
    assert gate.why_not(invited(), PEER, Right.JOIN, time.time()) is None, "who is invited again comes in again"


@pytest.mark.parametrize(
    ("number", "kind", "remedy"),
    [(errno.ENOSPC, DiskTakesNothing, "free some space"), (errno.EACCES, ConfigError, "pass another --home")],
)
def test_what_cannot_be_written_is_said_with_a_remedy(run_file, tmp_path, monkeypatch, number, kind, remedy):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("dilocox_peer.peer.desk.replace_file", refuse)
    with pytest.raises(kind, match=f"revocations cannot be written: {os.strerror(number)}; .*{remedy}"):
        run_revoke(RevokeFlags(path=run_file, target=PEER, home=tmp_path))
