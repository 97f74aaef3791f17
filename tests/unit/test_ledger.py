"""What certificates count of each peer: the fold, and `ledger` over what lies on a disk."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dilocox_peer.cli.main import app
from dilocox_peer.errors import ConfigError
from dilocox_peer.peer.rounds.durable import Durable, Votes, encode_record
from dilocox_peer.peer.rounds.ledger import Ledger
from dilocox_peer.peer.state.anchors import keep_manifest
from dilocox_peer.wire.declared import replaced
from tests.certified_stage import MANIFEST, ROSTER, CertifiedStage

TOKENS = MANIFEST.inner.micro_batch * MANIFEST.model.context


def certified(rounds: int, stage: int = 0) -> CertifiedStage:
    made = CertifiedStage(stage=stage)
    for _ in range(rounds):
        made.round()
    return made


def written(folder: Path, *stages: CertifiedStage) -> Path:
    """A run folder with the logs of these stages."""
    keep_manifest(folder, MANIFEST)
    for stage in stages:
        log = folder / f"stage{stage.stage}" / "rounds.log"
        log.parent.mkdir(parents=True)
        chain = tuple(stage.certificates)
        log.write_bytes(encode_record(Durable(0, chain, Votes(chain[-1].head))))
    return folder


def told(*arguments: object) -> str:
    """What it prints, without remarks. Raises what it ends with."""
    result = CliRunner().invoke(app, ["ledger", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_it_counts_rounds_work_and_bytes() -> None:
    ledger = Ledger.of(certified(3).certificates)
    assert (ledger.rounds, ledger.micro_batches) == (3, 36)
    for credit in ledger.ranked():
        assert (credit.rounds, credit.micro_batches, credit.size_bytes) == (3, 12, 30)
        assert (credit.first_round, credit.last_round) == (1, 3)
        assert ledger.share_of(credit.peer) == pytest.approx(1 / 3)
    assert [each.peer for each in ledger.ranked()] == sorted(ROSTER)


def test_of_nothing_nobody_has_a_share() -> None:
    assert Ledger.of([]).share_of(ROSTER[0]) == 0.0


def test_a_folder_is_counted_after_its_signatures_are_checked(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", certified(4), certified(2, stage=1))
    summary = json.loads(told("--run-folder", folder, "--json"))
    assert [(stage["rounds"], stage["tokens"]) for stage in summary["stages"]] == [(4, 48 * TOKENS), (2, 24 * TOKENS)]
    assert summary["stages"][0]["peers"][0]["tokens"] == 16 * TOKENS
    text = told("--run-folder", folder)
    assert "stage 0: 24,576 tokens in 4 rounds; 5 certificates verified" in text
    assert text.count("33.3%  4 rounds, 1-4") == 3


def test_what_was_changed_by_hand_counts_nothing(tmp_path: Path) -> None:
    stage = certified(3)
    last = stage.certificates[-1]
    more = tuple(replaced(entry, micro_batches=1_000) for entry in last.value.entries)
    stage.certificates[-1] = replaced(last, value=replaced(last.value, entries=more))
    folder = written(tmp_path / "run", stage)
    with pytest.raises(ConfigError, match="no certificates of this run are here"):
        told("--run-folder", folder)


def test_the_longer_of_two_disks_counts(tmp_path: Path) -> None:
    long = certified(5)
    short = CertifiedStage(stage=0)
    short.certificates = list(long.certificates[:3])
    folders = [written(tmp_path / "a", short), written(tmp_path / "b", long), written(tmp_path / "c", short)]
    text = told(*(each for folder in folders for each in ("--run-folder", folder)), "--json")
    assert json.loads(text)["stages"][0]["rounds"] == 5


def test_a_claim_counts_as_far_as_the_mean_weighs_it() -> None:
    """One of three says that it has done all the work there is."""
    made = certified(1)
    value = made.certificates[-1].value
    claims = (2**31, 10, 12)
    entries = [replaced(entry, micro_batches=claim) for entry, claim in zip(value.entries, claims, strict=True)]
    ledger = Ledger.of([replaced(made.certificates[-1], value=replaced(value, entries=tuple(entries)))])
    assert [ledger.by_peer[entry.peer].micro_batches for entry in entries] == [4 * 12, 10, 12]


def test_one_contribution_under_two_names_is_credited_once() -> None:
    made = certified(1)
    value = made.certificates[-1].value
    entries = [replaced(entry, micro_batches=8) for entry in value.entries]
    entries[1] = replaced(entries[1], blob=entries[0].blob)
    ledger = Ledger.of([replaced(made.certificates[-1], value=replaced(value, entries=tuple(entries)))])
    assert [ledger.by_peer[entry.peer].micro_batches for entry in entries] == [4, 4, 8]
