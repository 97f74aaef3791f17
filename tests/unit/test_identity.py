import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.errors import ConfigError
from dilocox_peer.peer import identity as identity_module
from dilocox_peer.peer.identity import Identity, decode_key, encode_key


def test_an_identity_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "identity.key"
    with Identity.open(path) as first:
        peer = first.peer_id
        signature = first.key.sign(b"x")
    with Identity.open(path) as second:
        assert second.peer_id == peer
        assert second.key.sign(b"x") == signature
    assert peer.startswith("12D3KooW")
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]


def test_the_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with Identity.open(tmp_path / "k" / "identity.key") as identity:
            assert stat.S_IMODE(identity.path.stat().st_mode) == 0o600
            assert stat.S_IMODE(identity.path.parent.stat().st_mode) == 0o700
    finally:
        os.umask(old)


def test_the_file_is_what_p2pd_reads(tmp_path: Path) -> None:
    with Identity.open(tmp_path / "identity.key") as identity:
        raw = identity.path.read_bytes()
        assert raw[:4] == bytes.fromhex("08011240")  # key_type: Ed25519, data of 64 bytes
        assert raw[36:] == identity.key.public_key
        assert len(raw) == 68


@given(st.binary(min_size=32, max_size=32))
def test_a_key_survives_its_file_form(seed: bytes) -> None:
    assert decode_key(encode_key(seed)).public_key == encode_key(seed)[36:]


@given(st.binary(max_size=100))
def test_other_bytes_are_refused_with_a_reason(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"is |holds "):
        decode_key(raw)


def test_a_second_opening_in_this_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    with (
        Identity.open(path),
        pytest.raises(ConfigError, match=rf"in use by process {os.getpid()}: stop it, or pass another"),
    ):
        Identity.open(path)
    Identity.open(path).close()


def test_a_link_to_the_file_is_the_same_identity(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    with Identity.open(path):
        (tmp_path / "link").symlink_to(path)
        with pytest.raises(ConfigError, match="in use by another process"):
            Identity.open(tmp_path / "link")


@pytest.mark.slow
def test_a_second_process_is_told_the_pid_of_the_first_and_takes_over_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    script = f"from dilocox_peer.peer.identity import Identity\nx = Identity.open({str(path)!r})\nprint(x.peer_id, flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        peer = holder.stdout.readline().strip()
        with pytest.raises(ConfigError, match=f"in use by process {holder.pid}:"):
            Identity.open(path)
        holder.kill()
        holder.wait()
    with Identity.open(path) as identity:
        assert identity.peer_id == peer


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777, 0o610])
def test_a_file_with_rights_for_others_is_refused_with_the_chmod_line(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity.key"
    Identity.open(path).close()
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        Identity.open(path)
    path.chmod(0o600)
    Identity.open(path).close()


def test_a_read_only_key_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    Identity.open(path).close()
    path.chmod(0o400)
    Identity.open(path).close()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "is empty"),
        (bytes.fromhex("080012a809") + bytes(100), "RSA key"),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----\n", "no libp2p Ed25519 key file"),
        (encode_key(bytes(32))[:-1], "no libp2p Ed25519 key file"),
        (encode_key(bytes(32)) + b"\0", "no libp2p Ed25519 key file"),
        (encode_key(bytes(32))[:-1] + b"\0", "is damaged"),
    ],
)
def test_a_file_of_another_form_is_refused_and_kept(tmp_path: Path, raw: bytes, says: str) -> None:
    path = tmp_path / "identity.key"
    path.touch(0o600)
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match=says):
        Identity.open(path)
    assert path.read_bytes() == raw


def test_of_a_file_that_is_no_key_no_other_mode_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "passwd"
    path.write_text("root:x:0:0:root:/root:/bin/bash\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="no libp2p Ed25519 key file: pass another --owner-key") as refused:
        Identity.open(path, flag="--owner-key")
    assert "chmod" not in str(refused.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="directory"):
        Identity.open(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        Identity.open(tmp_path / "pipe")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not a directory"):
        Identity.open(tmp_path / "file" / "identity.key")


def test_two_processes_that_create_at_once_agree_on_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "identity.key"
    link = identity_module.hard_link

    def another_is_faster(source: Path, target: Path) -> None:
        monkeypatch.setattr(identity_module, "hard_link", link)
        identity_module.create_key(target)
        link(source, target)

    monkeypatch.setattr(identity_module, "hard_link", another_is_faster)
    with Identity.open(path) as identity:
        assert decode_key(path.read_bytes()).peer_id == identity.peer_id
    assert [entry.name for entry in tmp_path.iterdir()] == ["identity.key"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    if os.getuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="permission denied"):
        Identity.open(tmp_path / "identity.key")


def test_the_key_is_not_shown(tmp_path: Path) -> None:
    with Identity.open(tmp_path / "identity.key") as identity:
        assert repr(identity) == f"Identity({identity.peer_id})"
