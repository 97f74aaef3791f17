"""run.toml: what `init` writes is read back; what a person gets wrong is named."""

import pytest

from dilocox_peer.config import PRESETS, parse_toml, preset, read_manifest, read_signed_manifest, to_toml
from dilocox_peer.errors import ConfigError
from dilocox_peer.manifest import MAX_MANIFEST_BYTES, MAX_MEMBERS, Manifest
from dilocox_peer.signing import SigningKey

OWNER = SigningKey(b"o" * 32)
MEMBER = SigningKey(b"m" * 32).peer_id


@pytest.mark.parametrize("name", PRESETS)
def test_a_written_file_reads_back_as_the_same_manifest(name):
    manifest = preset(name).signed_by(OWNER)
    assert parse_toml(to_toml(manifest), source="run.toml") == manifest


def test_a_full_list_of_members_reads_back_and_is_no_larger_than_a_manifest_may_be():
    members = tuple(SigningKey(number.to_bytes(32, "big")).peer_id for number in range(MAX_MEMBERS))
    manifest = preset("tiny", admission={"mode": "list", "members": members}).signed_by(OWNER)
    assert parse_toml(to_toml(manifest), source="run.toml") == manifest
    assert Manifest.from_bytes(manifest.to_bytes(), run_id=manifest.run_id) == manifest
    assert max(len(to_toml(manifest)), len(manifest.to_bytes())) <= MAX_MANIFEST_BYTES


def test_every_field_has_a_comment():
    lines = to_toml(preset("tiny")).splitlines()
    assert all("#" in line for line in lines if " = " in line and not line.startswith("#"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("speed = 1", "run.toml: speed: unknown field"),
        ("[model]\nlayer = 2", "run.toml: model.layer: unknown field"),
        ('[model]\nlayers = "two"', "model.layers: input should be a valid integer"),
        ("[model]\nlayers = 2.5", "model.layers: input should be a valid integer"),
        ("[model]\nlayers = true", "model.layers: input should be a valid integer"),
        ("[model]\nlayers = 0", "model.layers: input should be greater than 0"),
        ("[model]\nheads = 5", "hidden_size 96 must be heads 5 times an even number"),
        ("[model]\nkv_heads = 3", "kv_heads 3 must divide heads 4"),
        ("[stages]\ncount = 3", "stages.count 3 exceeds model.layers 2"),
        ("[inner]\nlearning_rate = nan", "inner.learning_rate"),
        ("[inner]\nlearning_rate = inf", "inner.learning_rate"),
        ('[outer]\noverlap = "soon"', "outer.overlap: input should be 'arrival', 'one-step' or 'none'"),
        ('[compression]\ncodec = "zip"', "compression.codec"),
        ("format = 2", "format"),
        ('[admission]\nmode = "closed"', "admission.mode: input should be 'open', 'invite' or 'list'"),
        ('[admission]\nmode = "list"', 'members are for mode "list", which needs some'),
        (f'[admission]\nmembers = ["{MEMBER}"]', 'members are for mode "list", which needs some'),
        (f'[admission]\nmode = "list"\nmembers = ["{MEMBER}", "{MEMBER}"]', "one is listed twice"),
        ('[admission]\nmode = "list"\nmembers = ["me"]', "'me' is no Ed25519 PeerID"),
        (f'[admission]\nmode = "list"\nmembers = [{", ".join(["1"] * 513)}]', "admission.members"),
        ('[run]\nname = "my run"', "pattern '^[A-Za-z0-9._-]{1,64}$' (got \"my run\")"),
        ("[", "not valid TOML"),
    ],
)
def test_a_mistake_is_named_in_one_line(text, complaint):
    with pytest.raises(ConfigError) as raised:
        parse_toml(text, source="run.toml")
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_unknown_preset_names_those_that_exist():
    with pytest.raises(ConfigError, match="tiny, small"):
        preset("huge")


def test_a_mark_of_windows_editors_at_the_head_of_a_run_file_is_passed_over(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("\ufeff[rounds]\ntotal = 7\n")
    assert read_manifest(path).rounds.total == 7


def test_files_that_are_no_run_file_are_named(tmp_path):
    with pytest.raises(ConfigError, match="dilocox-peer init"):
        read_manifest(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is a directory: name the run file"):
        read_manifest(tmp_path)
    binary = tmp_path / "run.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_manifest(binary)
    binary.write_bytes(b"#" * 70_000)
    with pytest.raises(ConfigError, match="larger than"):
        read_manifest(binary)


def test_an_unsigned_or_changed_file_is_told_how_to_sign(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(to_toml(preset("tiny")))
    with pytest.raises(ConfigError, match="not signed: run `dilocox-peer sign"):
        read_signed_manifest(path)
    signed = to_toml(preset("tiny").signed_by(OWNER))
    path.write_text(signed)
    assert read_signed_manifest(path).is_signed
    path.write_text(signed.replace("total = 1600", "total = 64"))
    with pytest.raises(ConfigError, match="changed after it was signed"):
        read_signed_manifest(path)


@pytest.mark.parametrize("eos", ["\n", "\x02", "\x7f", "a'\"\n", "</s>", "\u2028"])
def test_a_run_file_that_is_written_is_read(eos):
    manifest = preset("tiny", data={"tokenizer": "0" * 64, "eos": eos})
    assert parse_toml(to_toml(manifest), source="run.toml") == manifest


@pytest.mark.parametrize("number", ["9" * 30, "9" * 5000, "0x" + "F" * 5000], ids=["30", "5000", "5000 hex"])
@pytest.mark.parametrize("field", ["total = 1600", "seed = 0"])
def test_a_number_of_too_many_digits_is_named(field, number):
    text = to_toml(preset("tiny"))
    assert field in text
    text = text.replace(field, f"{field.partition(' ')[0]} = {number}")
    with pytest.raises(ConfigError, match=r"run\.toml"):
        parse_toml(text, source="run.toml")


def test_brackets_in_brackets_are_no_traceback():
    with pytest.raises(ConfigError, match=r"run\.toml"):
        parse_toml("x = " + "[" * 5000, source="run.toml")
