"""What `owner` takes and refuses, of a run that is on in no network."""

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_peer.cli import invite, visit
from dilocox_peer.cli.flags import InitFlags
from dilocox_peer.cli.flags_of_owner import OwnerFlags
from dilocox_peer.cli.home import PeerHome
from dilocox_peer.cli.init import write_run_file
from dilocox_peer.cli.invite import BOOTSTRAP
from dilocox_peer.cli.owner import CHANGES, run_owner
from dilocox_peer.config import preset, read_signed_manifest
from dilocox_peer.errors import ConfigError, DiskTakesNothing
from dilocox_peer.invitation import Invitation, format_invitation
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.desk import OwnerRecords
from dilocox_peer.peer.identity import Identity, read_key
from dilocox_peer.wire.directives import Directive, sign_directive


@pytest.fixture
def said(tmp_path: Path):
    """Says it as the owner of a run with one bootstrap in the same home."""
    run_file = tmp_path / "run.toml"
    write_run_file(InitFlags(path=run_file, home=tmp_path))

    def say(what: str, value: str | None = None, link: str | None = None, **flags: Any) -> None:
        run_owner(OwnerFlags(what=what, value=value, link=link, run_file=run_file, home=tmp_path, **flags))

    return say


class Elsewhere:
    """Where else the owner of the run spoke: in the run, and known to the bootstrap of this home."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.manifest: Manifest = read_signed_manifest(home / "run.toml")
        self.key = read_key(home / "owner.key", flag="--owner-key")
        self.records = OwnerRecords(home, self.manifest.run_id)
        self.link = format_invitation(
            Invitation(self.manifest.run_id, (f"/ip4/127.0.0.1/tcp/1/p2p/{self.key.peer_id}",))
        )
        self.in_run: list[Directive] = []
        self.published: list[Directive] = []
        self.known_here: int | None = None
        self.round_here: int | None = None
        self.rounds_in_run: list[int] = []  # as leases say
        self.word_in_run: int | None = None  # the round that the owner has signed last
        monkeypatch.setattr(visit, "visit", self._visit)
        monkeypatch.setattr(invite, "ask", self._ask)

    def says(self, number: int, **wants: Any) -> Directive:
        return sign_directive(Directive(self.manifest.digest, number, **wants), self.key.sign)

    @property
    def recorded(self) -> Directive | None:
        return self.records.directive(run=self.manifest.digest, owner=self.key.peer_id)

    async def _ask(self, _socket: Path, command: str) -> dict[str, Any]:
        assert command == "status"
        return {
            "status": {"runs": [{"run": self.manifest.run_id, "directive": self.known_here, "round": self.round_here}]}
        }

    @asynccontextmanager
    async def _visit(self, _invitation: Invitation) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(directory=self, settings=self._settings)

    async def _settings(self) -> Manifest:
        return self.manifest

    # ---- what `owner` asks of the directory ----

    async def directives(self) -> list[Directive]:
        return self.in_run

    async def word(self, _stage: int, _timeout_s: float) -> tuple[Any, float] | None:
        if self.word_in_run is None:
            return None
        return SimpleNamespace(round=self.word_in_run, is_last=False), 60.0

    async def peers(self, _stage: int, _timeout_s: float) -> list[Any]:
        return [SimpleNamespace(round=each) for each in self.rounds_in_run]

    async def publish_directive(self, directive: Directive) -> None:
        self.published.append(directive)


@pytest.fixture
def elsewhere(said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    return Elsewhere(tmp_path, monkeypatch)


def test_a_bootstrap_of_the_run_is_not_banned(said, tmp_path, capsys):
    with (
        Identity.open(PeerHome.at(tmp_path, BOOTSTRAP).identity_path) as bootstrap,
        Identity.open(tmp_path / "x") as other,
    ):
        with pytest.raises(ConfigError, match=f"{bootstrap.peer_id} is a bootstrap of the run.*stop it instead"):
            said("ban", bootstrap.peer_id)
        said("ban", other.peer_id)
    assert f"banned: {other.peer_id}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "value", "why"),
    [
        ("rate", None, "owner rate: write what the learning rate is multiplied by, 0.001 to 4 behind it"),
        ("rate", "eleven", "owner rate eleven: write what"),
        ("rate", "5", "owner rate 5: write what"),
        ("stop", "9" * 5000, r"owner stop 9{40}: write a round, as a whole number"),
        ("extend", "1" + "0" * 5000, "owner extend 10{39}: write how many rounds"),
        ("stop", "\u0664\u0660", "owner stop \u0664\u0660: write a round, as a whole number"),
        ("stop", "0", "owner stop 0: write a round"),
        ("show", "7", "owner show takes nothing behind it, not '7'"),
    ],
)
def test_what_is_missing_or_too_much_is_named(said, what, value, why):
    with pytest.raises(ConfigError, match=why):
        said(what, value)


def test_a_word_does_not_follow_on_older_records_than_the_bootstrap_here_has(said, elsewhere, capsys):
    elsewhere.known_here = 1
    with pytest.raises(ConfigError, match=r"bootstrap of this home knows directive 1, and .* has none: .*--link"):
        said("say", "hello")
    elsewhere.records.take_directive(elsewhere.says(1, paused=True), elsewhere.key.peer_id)
    said("say", "hello")
    assert elsewhere.recorded == elsewhere.says(2, paused=True, said="hello")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("what", ["show", "resume"])
def test_where_no_bootstrap_keeps_the_records_they_may_be_old_which_is_told(said, elsewhere, capsys, what):
    said(what)
    assert "may be old, and the next word takes back what was said elsewhere since; --link asks the run" in (
        capsys.readouterr().err
    )


def test_what_the_run_knows_comes_into_records_that_were_restored_from_a_copy(said, elsewhere):
    elsewhere.records.take_directive(elsewhere.says(1), elsewhere.key.peer_id)
    elsewhere.in_run = [elsewhere.says(4, stop_after=9)]
    said("show", link=elsewhere.link)
    assert elsewhere.recorded == elsewhere.says(4, stop_after=9)
    assert elsewhere.published == []


def test_what_the_run_knows_is_shown_where_nothing_can_be_written(said, elsewhere, capsys, monkeypatch):
    def refuses(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("dilocox_peer.peer.desk.replace_file", refuses)
    elsewhere.in_run = [elsewhere.says(4, stop_after=9)]
    said("show", link=elsewhere.link)
    told = capsys.readouterr()
    assert "directive 4: ends after round 9" in told.out
    assert "not written down here: " in told.err
    with pytest.raises(DiskTakesNothing, match="Read-only file system; mount it writable again"):
        said("pause", link=elsewhere.link)


def test_of_two_words_with_one_number_one_is_followed_and_the_other_told(said, elsewhere, capsys):
    somebody = elsewhere.key.peer_id.swapcase()
    elsewhere.records.take_directive(elsewhere.says(1, said="hello"), elsewhere.key.peer_id)
    elsewhere.in_run = [elsewhere.says(1, banned=(somebody,)), elsewhere.says(1, paused=True)]
    said("rate", "0.5", link=elsewhere.link)
    told = capsys.readouterr().out.splitlines()
    assert {line for line in told if "lost" in line} == {
        f"said in two places with number 1; this is lost unless you say it anew: {lost}"
        for lost in ('as the run\'s settings say, "hello"', "paused")
    }
    assert elsewhere.published == [elsewhere.says(2, banned=(somebody,), rate_permille=500)] == [elsewhere.recorded]


@pytest.mark.parametrize("where", ["leases", "word", "bootstrap"])
def test_a_stop_that_is_past_ends_no_run_by_mistake(said, elsewhere, where):
    elsewhere.rounds_in_run = [399, 400, 12] if where == "leases" else []
    elsewhere.word_in_run = 400 if where == "word" else None
    elsewhere.known_here, elsewhere.round_here = (0, 400) if where == "bootstrap" else (None, None)
    link = None if where == "bootstrap" else elsewhere.link
    for value in ("40", "400"):
        with pytest.raises(ConfigError, match=f"owner stop {value}: the run is at round 400.*name round 401 .*--force"):
            said("stop", value, link=link)
    assert elsewhere.recorded is None
    said("stop", "401", link=link)
    assert elsewhere.recorded == elsewhere.says(1, stop_after=401)
    said("stop", "40", link=link, force=True)
    assert elsewhere.recorded == elsewhere.says(2, stop_after=40)
    said("stop", "never", link=link)
    assert elsewhere.recorded == elsewhere.says(3)


def test_where_no_round_is_known_a_stop_asks_for_the_link_or_for_force(said, elsewhere):
    with pytest.raises(ConfigError, match=r"owner stop 40: .* is not known here: --link asks, --force says it"):
        said("stop", "40")
    with pytest.raises(ConfigError, match=r"owner stop 40: .* is not known here: --force says it"):
        said("stop", "40", link=elsewhere.link)
    said("stop", "40", force=True)
    assert elsewhere.recorded == elsewhere.says(1, stop_after=40)


def test_before_its_first_round_a_run_takes_any_stop(said, elsewhere):
    elsewhere.known_here = elsewhere.round_here = 0
    said("stop", "1")
    assert elsewhere.recorded == elsewhere.says(1, stop_after=1)


def test_several_stages_are_left_the_rounds_in_which_all_hear_of_a_stop(tmp_path):
    manifest = preset("tiny", stages={"count": 2})
    before, flags = Directive(manifest.digest, 1), OwnerFlags(what="stop", value="44")
    with pytest.raises(ConfigError, match=r"the run is at round 40 .* name round 45 "):
        CHANGES["stop"](before, flags, manifest, 40)
    assert CHANGES["stop"](before, replace(flags, value="45"), manifest, 40)["stop_after"] == 45


def test_a_run_that_was_extended_is_not_shortened_to_what_is_past(said, elsewhere):
    rounds, steps = elsewhere.manifest.rounds.total, elsewhere.manifest.rounds.inner_steps
    elsewhere.rounds_in_run = [rounds + 50]
    said("extend", str(rounds + 100), link=elsewhere.link)
    with pytest.raises(ConfigError, match=f"owner extend {rounds + 40}: the run is at round {rounds + 50} .*--force"):
        said("extend", str(rounds + 40), link=elsewhere.link)
    said("extend", str(rounds + 90), link=elsewhere.link)
    assert elsewhere.recorded == elsewhere.says(2, total_steps=(rounds + 90) * steps)


@pytest.mark.parametrize("what", ["pause", "show"])
def test_force_belongs_to_what_may_end_the_run(said, what):
    with pytest.raises(ConfigError, match="--force belongs to `owner stop` and `owner extend`"):
        said(what, force=True)
