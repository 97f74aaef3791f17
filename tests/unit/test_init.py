"""`init`, as far as it is about the run and not about a published model or its text."""

from pathlib import Path

import pytest

from dilocox_peer.cli.flags import InitFlags
from dilocox_peer.cli.init import write_run_file
from dilocox_peer.config import PRESETS, read_signed_manifest
from tests.tiny_models import tiny_json, write_folder


@pytest.mark.parametrize("name", [*PRESETS, None])
def test_every_run_that_init_writes_can_be_averaged_in_slices(name: str | None, tmp_path: Path) -> None:
    published = None
    if name is None:
        write_folder(published := tmp_path / "model", tiny_json("llama", vocab_size=256))
    for slices in (False, True):
        path = tmp_path / f"{slices}.toml"
        write_run_file(
            InitFlags(
                path=path,
                preset=name,
                published=published,
                context=32 if published else None,
                slices=slices,
                home=tmp_path,
            )
        )
        rounds = read_signed_manifest(path).rounds
        assert (rounds.averaging, rounds.num_slices) == (("slices", 16) if slices else ("all-to-all", 0))
