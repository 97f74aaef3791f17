"""What a person gets wrong is told in one line with the remedy and the documented exit code, and leaves nothing behind.

Every case runs the real command in a process of its own.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dilocox_peer.admission import Grant, Right, owner_of
from dilocox_peer.cli.home import PeerHome
from dilocox_peer.config import read_signed_manifest
from dilocox_peer.invitation import parse_invitation
from dilocox_peer.peer.identity import Identity
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import RunId
from tests.shell.commands import RUN, SOMEBODY, assert_refused, files_in, free_port, link_to, peer, run
from tests.shell.conftest import PATIENCE_S, PutRuns


@pytest.mark.parametrize(
    ("line", "needle"),
    [
        ("speed = 1", "speed: unknown field"),
        ('[model]\nlayers = "two"', "model.layers"),
        ("[rounds]\ntotal = -1", "rounds.total"),
    ],
)
def test_a_run_file_with_a_mistake_names_the_field(tmp_path, line, needle):
    path = tmp_path / "run.toml"
    path.write_text(line)
    assert_refused(peer(tmp_path, "bootstrap", str(path)), 2, str(path), needle)
    assert_refused(peer(tmp_path, "sign", str(path)), 2, str(path), needle)
    assert files_in(tmp_path) == {"run.toml"}
    assert path.read_text() == line


def test_signing_a_run_file_with_gaps_names_the_sections_that_were_filled_in(tmp_path, put_runs: PutRuns):
    [path] = put_runs(tmp_path, ["run.toml"])
    assert peer(tmp_path, "sign", str(path)).stderr == ""
    lines = path.read_text().replace("seed = 0", "").splitlines()
    del lines[lines.index("[limits]") : lines.index("[owner]")]
    path.write_text("\n".join(lines))
    done = peer(tmp_path, "sign", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"note: filled in with defaults what {path} left out of run, limits, admission\n"


def test_a_home_that_another_peer_has_is_refused_whatever_its_path_and_key(tmp_path):
    """Its lock lay elsewhere where sockets could not be in it: two peers wrote one log of votes."""
    folder = tmp_path / "my home"
    home = PeerHome.at(folder, "default")
    home.make()
    key = str(tmp_path / "other.key")
    with home.owned():
        done = peer(folder, "join", link_to(free_port()), "--identity-path", key)
        assert_refused(done, 2, str(home.folder), "in use by another peer: stop it, or pass another --name")
    with home.owned():
        pass  # it was given back


def test_init_does_not_overwrite(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("mine")
    assert_refused(peer(tmp_path, "init", str(path)), 2, "exists", "--force")
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("sign", "run.toml"),
        ("bootstrap", "run.toml"),
        ("init", "run.toml"),
        ("replay", "--log-file"),
    ],
)
def test_a_folder_in_place_of_a_file_has_a_remedy_that_works(tmp_path, command, remedy):
    folder = tmp_path / "folder"
    folder.mkdir()
    home = [] if command == "replay" else ["--home", str(tmp_path)]
    done = run(command, str(folder), *home)
    assert_refused(done, 2, f"{folder} is a directory", remedy)
    assert "--force" not in done.stderr


def test_a_run_name_that_is_none_names_its_flag(tmp_path):
    done = peer(tmp_path, "init", str(tmp_path / "run.toml"), "--run-name", "a b")
    assert_refused(done, 2, "--run-name 'a b'")
    assert files_in(tmp_path) == set()


def test_init_with_an_unknown_preset_writes_nothing(tmp_path):
    assert_refused(peer(tmp_path, "init", str(tmp_path / "run.toml"), "--preset", "huge"), 2, "huge", "tiny")
    assert files_in(tmp_path) == set()


def test_a_folder_for_keys_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    done = peer(tmp_path / "file" / "home", "init", str(tmp_path / "run.toml"))
    assert_refused(done, 2, str(tmp_path / "file" / "home"), "--home", "--owner-key")
    assert files_in(tmp_path) == {"file"}


def test_a_run_file_signed_by_another_key_or_changed_is_not_served(tmp_path, put_runs: PutRuns):
    [path] = put_runs(tmp_path, ["run.toml"])
    path.write_text(path.read_text().replace("total = ", "total = 1"))
    assert_refused(peer(tmp_path, "bootstrap", str(path)), 2, "changed after it was signed", "dilocox-peer sign")


@pytest.mark.parametrize(
    "link", ["hello", "dilocox://", "dilocox://abc@/ip4/1.2.3.4/tcp/1", f"dilocox://{RUN}@/ip4/127.0.0.1/tcp/4711"]
)
def test_a_nonsense_link_says_what_is_wrong_with_it(tmp_path, link):
    assert_refused(peer(tmp_path, "join", link), 2, "link" if "4711" not in link else "/p2p/")
    assert files_in(tmp_path) == set()


def test_a_terminal_without_utf_8_gets_a_question_mark_not_a_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "dilocox_peer", "init", "to…do.toml", "--home", str(tmp_path / "home")],
        capture_output=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONUTF8": "1", "PYTHONIOENCODING": "latin-1"},
    )
    assert done.returncode == 0, done.stderr
    assert b"wrote to?do.toml" in done.stdout
    assert (tmp_path / "to…do.toml").exists()
    assert b"Traceback" not in done.stderr


OWNER, OTHERS = SigningKey(b"o" * 32), SigningKey(b"n" * 32)


def an_invitation(run_id: RunId = RUN, key: SigningKey = OWNER) -> Grant:
    return Grant(run_id, bytes(16), frozenset({Right.JOIN}), 1, 2, None, 3).signed_by(key)


@pytest.mark.parametrize(
    ("end", "code", "needles"),
    [
        ("#invite=", 2, ["invitation at the end of the link is damaged", "copy the link whole"]),
        ("#invite=" + an_invitation().to_text()[:-5], 2, ["damaged", "copy the link whole"]),
        ("#invite=" + "A" * 345, 2, ["at most 344 characters"]),
        ("#inv", 2, ["the link ends with '#inv'", "copy it again"]),
        ("?invite=abc", 2, ["PeerID"]),
        ("#invite=" + an_invitation(RunId("cd" * 32)).to_text(), 4, ["is for run cdcdcdcdcdcd", "ask the run's owner"]),
    ],
)
def test_a_link_with_a_bad_invitation_says_which_part_is_wrong(tmp_path, end, code, needles):
    assert_refused(peer(tmp_path, "join", link_to(1) + end), code, *needles)
    assert files_in(tmp_path) == set()


@pytest.fixture
def invite_only(tmp_path: Path, put_runs: PutRuns) -> Path:
    [path] = put_runs(tmp_path, ["run.toml", "--admission", "invite"])
    return path


def test_an_invitation_is_printed_alone_so_that_it_can_be_piped(tmp_path, invite_only):
    manifest = read_signed_manifest(invite_only)
    done = peer(tmp_path, "invite", str(invite_only), "--link", link_to(1, manifest.run_id), "--uses", "3")
    assert done.returncode == 0, done.stderr
    invitation = parse_invitation(done.stdout)
    assert done.stdout == f"{invitation.link}\n"
    assert invitation.grant is not None
    assert (invitation.grant.uses, invitation.grant.is_signed_by(owner_of(manifest))) == (3, True)
    assert "for the first 3 peers" in done.stderr
    assert f"revoke {invite_only} {invitation.grant.grant_id.hex()}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "needles"),
    [
        (["--for", "nobody"], ["--for 'nobody' is no Ed25519 PeerID"]),
        (["--for", SOMEBODY, "--uses", "2"], ["--for and --uses", "one of them"]),
        (["--expires", "soon"], ["--expires 'soon'", "7d"]),
        (["--expires", "99999w"], ["at most 3660d"]),
        (["--rights", "rule"], ["--rights 'rule'", "join or read"]),
        ([], ["no bootstrap of run 'tiny' answers on this machine", "--link"]),
        (["--link", link_to(1)], ["--link is to run abababababab"]),
        (["--link", link_to(1), "--address", f"/ip4/127.0.0.1/tcp/1/p2p/{SOMEBODY}"], ["--link and --address"]),
        (["--address", "/ip4/127.0.0.1/tcp/1"], ["/p2p/"]),
        (["--owner-key", "nowhere.key"], ["nowhere.key does not exist", "--owner-key"]),
    ],
)
def test_an_invitation_that_cannot_be_made_names_the_flag(tmp_path, invite_only, arguments, needles):
    assert_refused(peer(tmp_path, "invite", str(invite_only), *arguments), 2, *needles)


def test_invitations_and_revocations_take_the_key_that_signed_the_run(tmp_path, invite_only):
    key = tmp_path / "another.key"
    Identity.open(key).close()
    for command in (["invite", str(invite_only)], ["revoke", str(invite_only), "00" * 16]):
        assert_refused(peer(tmp_path, *command, "--owner-key", str(key)), 2, str(key), "is not the key that signed")
    done = peer(tmp_path, "bootstrap", str(invite_only), "--owner-key", str(key))
    assert_refused(done, 2, "--owner-key", "signed none of these runs")


def test_an_open_run_needs_no_invitations(tmp_path, put_runs: PutRuns):
    [path] = put_runs(tmp_path, ["run.toml"])
    assert_refused(peer(tmp_path, "invite", str(path)), 2, "everybody may join", "admission.mode")
    assert_refused(peer(tmp_path, "revoke", str(path), "00" * 16), 2, "is open")


def test_a_list_of_members_is_written_in_the_file(tmp_path):
    path = tmp_path / "run.toml"
    assert_refused(peer(tmp_path, "init", str(path), "--admission", "list"), 2, "[admission]", str(path))
    assert files_in(tmp_path) == set()


@pytest.mark.parametrize(
    ("target", "needle"),
    [
        ("nobody", "'nobody' is no Ed25519 PeerID"),
        (link_to(1), "has no invitation in it"),
        ("00" * 15, "no Ed25519 PeerID"),
    ],
)
def test_what_cannot_be_revoked_is_named(tmp_path, invite_only, target, needle):
    assert_refused(peer(tmp_path, "revoke", str(invite_only), target), 2, needle)
    assert not (tmp_path / "admission").exists()


def test_the_owner_cannot_be_put_out_and_another_can(tmp_path, invite_only):
    owner = owner_of(read_signed_manifest(invite_only))
    assert_refused(peer(tmp_path, "revoke", str(invite_only), owner), 2, "the run's owner")
    done = peer(tmp_path, "revoke", str(invite_only), SOMEBODY)
    assert done.returncode == 0, done.stderr
    assert SOMEBODY in done.stdout


def test_cards_that_are_not_here_are_named_before_anybody_is_asked(tmp_path):
    done = peer(tmp_path, "join", link_to(free_port()), "--gpus", "990,991")
    assert_refused_at_last(done, "--gpus 990,991: cuda:990 cannot be used here")
    done = peer(tmp_path, "join", link_to(free_port()), "--gpus", "0", "--device", "cuda")
    assert_refused(done, 2, "--gpus and --device")


@pytest.mark.parametrize(
    ("flag", "value", "needle"),
    [
        ("--gpus", "a", "--gpus a: numbers of cards with commas"),
        ("--device", "cuba", "--device cuba is no device: use auto, cpu, mps, xpu, cuda, or cuda:N"),
        ("--device", "cuda:0,cuda:b", "--device cuda:0,cuda:b is no device"),
        ("--base-bits", "3", "--base-bits 3: 8 or 4; leave it out"),
    ],
)
def test_what_names_no_cards_and_no_bits_is_told_before_anything_is_loaded(tmp_path, flag, value, needle):
    assert_refused(peer(tmp_path, "join", link_to(free_port()), flag, value), 2, needle)


def assert_refused_at_last(done: subprocess.CompletedProcess[str], needle: str) -> None:
    """Behind the lines that say which step it is at."""
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr + done.stdout
    assert needle in done.stderr.strip().splitlines()[-1]


def test_a_missing_data_path_is_named_before_anything_starts(tmp_path):
    done = peer(tmp_path, "join", link_to(1), "--data", str(tmp_path / "nowhere"))
    assert_refused(done, 2, str(tmp_path / "nowhere"), "does not exist")
    assert files_in(tmp_path) == set()


def test_an_unreachable_bootstrap_is_exit_code_3(tmp_path):
    port = free_port()
    done = peer(tmp_path, "join", link_to(port), "--host-maddrs", "/ip4/127.0.0.1/tcp/0")
    assert_refused(done, 3, "joining failed at reaching the run", f"127.0.0.1/tcp/{port}")


def test_join_checks_this_machine_before_it_makes_anything(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = peer(tmp_path, "join", link_to(1), "--host-maddrs", f"/ip4/127.0.0.1/tcp/{port}")
    assert_refused(done, 2, "joining failed at checking this machine", str(port), "--host-maddrs")
    assert files_in(tmp_path) == set()


def test_a_public_name_is_short_and_can_be_seen(tmp_path):
    for name in ("x" * 41, "a\nb", "\u202eevil"):
        assert_refused(peer(tmp_path, "join", link_to(1), "--public-name", name), 2, "--public-name", "at most 40")
    assert files_in(tmp_path) == set()


def test_a_page_that_cannot_be_served_is_told_before_anything_starts(tmp_path, put_runs: PutRuns):
    [path] = put_runs(tmp_path, ["run.toml"])
    before = files_in(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_refused(peer(tmp_path, "bootstrap", str(path), "--web-port", port), 2, port, "--web-port", "in use")
    done = peer(tmp_path, "bootstrap", str(path), "--web-port", "0", "--web-host", "203.0.113.77")
    assert_refused(done, 2, "203.0.113.77", "--web-host")
    assert_refused(peer(tmp_path, "bootstrap", str(path), "--web-port", "0", "--no-keep"), 2, "--no-keep")
    assert files_in(tmp_path) == before


def test_a_port_in_use_is_named(tmp_path, put_runs: PutRuns):
    [path] = put_runs(tmp_path, ["run.toml"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = peer(tmp_path, "bootstrap", str(path), "--host-maddrs", f"/ip4/127.0.0.1/tcp/{port}")
    assert_refused(done, 2, str(port), "in use")


def test_an_identity_in_use_is_named_with_the_way_out(tmp_path):
    key = tmp_path / "me.key"
    with Identity.open(key):
        done = peer(tmp_path, "join", link_to(1), "--identity-path", str(key))
    assert_refused(done, 2, str(key), "in use")


def test_a_file_that_is_no_key_is_refused_and_left_alone(tmp_path):
    key = tmp_path / "me.key"
    key.write_text("not a key")
    key.chmod(0o600)
    assert_refused(peer(tmp_path, "join", link_to(1), "--identity-path", str(key)), 2, str(key))
    assert key.read_text() == "not a key"


def test_a_key_that_others_can_read_is_refused_with_the_chmod_line(tmp_path):
    key = tmp_path / "me.key"
    Identity.open(key).close()
    key.chmod(0o644)
    assert_refused(peer(tmp_path, "join", link_to(1), "--identity-path", str(key)), 2, "chmod 600")


def test_a_command_that_is_terminated_leaves_nothing_behind_and_ends_as_by_the_signal(tmp_path):
    script = (
        "import asyncio, tempfile\n"
        "from dilocox_peer import __main__\n"
        "from dilocox_peer.cli import main\n"
        "async def work():\n"
        f"    with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):\n"
        "        print('here', flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "main.app = lambda *_, **__: asyncio.run(work())\n"
        "__main__.main()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "here\n"
        assert len(list(tmp_path.iterdir())) == 1
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_command_that_is_stopped_while_it_is_imported_says_nothing(tmp_path, sent, code):
    (tmp_path / "typer.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "dilocox_peer", "status"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's job in the background ignores it
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(sent)
    _said, complaint = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, complaint) == (code, "")
