"""What `owner` takes and refuses, of a run that is on in no network."""

from pathlib import Path

import pytest

from dilocox_peer.cli.flags import InitFlags
from dilocox_peer.cli.flags_of_owner import OwnerFlags
from dilocox_peer.cli.home import PeerHome
from dilocox_peer.cli.init import write_run_file
from dilocox_peer.cli.invite import BOOTSTRAP
from dilocox_peer.cli.owner import run_owner
from dilocox_peer.errors import ConfigError
from dilocox_peer.peer.identity import Identity


@pytest.fixture
def said(tmp_path: Path):
    """Says it as the owner of a run with one bootstrap in the same home."""
    run_file = tmp_path / "run.toml"
    write_run_file(InitFlags(path=run_file, home=tmp_path))

    def say(what: str, value: str | None = None) -> None:
        run_owner(OwnerFlags(what=what, value=value, run_file=run_file, home=tmp_path))

    return say


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
