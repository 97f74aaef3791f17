"""The manifest is what its run id says, or it is refused."""

import json

import pytest
from pydantic import BaseModel

from dilocox_peer.config import PRESETS, preset
from dilocox_peer.errors import ConfigError, DilocoxError, ManifestMismatch
from dilocox_peer.manifest import MAX_MANIFEST_BYTES, Manifest
from dilocox_peer.signing import SigningKey

OWNER = SigningKey(b"o" * 32)
STRANGER = SigningKey(b"s" * 32)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_the_wire(name):
    manifest = preset(name).signed_by(OWNER)
    assert Manifest.from_bytes(manifest.to_bytes(), run_id=manifest.run_id) == manifest


def test_the_run_id_names_every_setting_and_the_owner_but_not_the_signature():
    manifest = Manifest().signed_by(OWNER)
    assert manifest.run_id != Manifest().signed_by(STRANGER).run_id
    changed = manifest.model_copy(update={"rounds": manifest.rounds.model_copy(update={"total": 33})})
    assert changed.run_id != manifest.run_id
    resigned = manifest.model_copy(update={"owner": manifest.owner.model_copy(update={"signature": "0" * 128})})
    assert resigned.run_id == manifest.run_id


def test_another_run_is_refused():
    manifest = Manifest().signed_by(OWNER)
    with pytest.raises(ManifestMismatch, match="ask for a new link"):
        Manifest.from_bytes(manifest.to_bytes(), run_id=Manifest().signed_by(STRANGER).run_id)


def test_a_manifest_without_its_owners_signature_is_refused():
    manifest = Manifest().signed_by(OWNER)
    forged = manifest.model_copy(update={"owner": manifest.owner.model_copy(update={"signature": "0" * 128})})
    with pytest.raises(ManifestMismatch, match="signature"):
        Manifest.from_bytes(forged.to_bytes(), run_id=manifest.run_id)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b'{"format": 2}', b'{"rounds": {"total": 1e999}}'])
def test_garbage_is_refused_with_a_reason(raw):
    with pytest.raises(ManifestMismatch):
        Manifest.from_bytes(raw, run_id=Manifest().run_id)


def test_a_large_manifest_is_not_even_read():
    with pytest.raises(ManifestMismatch, match="at most"):
        Manifest.from_bytes(b" " * (MAX_MANIFEST_BYTES + 1), run_id=Manifest().run_id)


@pytest.mark.parametrize("number", [2**63, 10**20, 10**400], ids=["63 bits", "20 digits", "400 digits"])
def test_a_number_that_no_message_carries_is_refused_in_every_setting(number):
    """`demo --rounds 99999999999999999999` ended in a traceback."""
    whole = [
        (name, field) for name, section in preset("tiny") if isinstance(section, BaseModel)
        for field, value in section if isinstance(value, int)
    ]  # fmt: skip
    assert ("rounds", "total") in whole
    for name, field in whole:
        with pytest.raises(ConfigError, match=rf"{name}\.{field}: input should be"):
            preset("tiny", **{name: {field: number}})
        document = json.loads(Manifest().to_bytes())
        document[name][field] = number
        with pytest.raises(ManifestMismatch, match=rf"{name}\.{field}: input should be"):
            Manifest.from_bytes(json.dumps(document).encode(), run_id=Manifest().run_id)


def test_unknown_fields_are_refused_so_that_versions_do_not_mix_silently():
    manifest = Manifest().signed_by(OWNER)
    document = json.loads(manifest.to_bytes())
    document["rounds"]["speed"] = 3
    with pytest.raises(ManifestMismatch, match=r"rounds\.speed: unknown field"):
        Manifest.from_bytes(json.dumps(document).encode(), run_id=manifest.run_id)


def test_a_run_that_averages_all_to_all_is_the_run_it_was_before_there_were_slices():
    plain, sliced = (
        preset("tiny", rounds={"averaging": averaging}, compression={"codec": "int4", "adapt": "off"})
        for averaging in ("all-to-all", "slices")
    )
    assert b"averaging" not in plain.to_bytes() + plain.signed_bytes()
    assert b"averaging" in sliced.to_bytes()
    assert plain.run_id != sliced.run_id
    for manifest in (plain, sliced):
        assert Manifest.model_validate_json(manifest.to_bytes()) == manifest


@pytest.mark.parametrize("compression", [{"codec": "int4", "adapt": "rank"}, {"codec": "lowrank-int4", "adapt": "off"}])
def test_slices_are_refused_where_they_cannot_be(compression):
    with pytest.raises(ConfigError, match="slices"):
        preset("tiny", rounds={"averaging": "slices"}, compression=compression)


def test_a_strangers_manifest_of_more_layers_than_are_plausible_is_refused():
    """1.4 kB, of which lists of ten million layers were made before anybody was told."""
    tiny = preset("tiny")
    deep = tiny.model.model_copy(update={"layers": 10_000_000})
    many = tiny.model_copy(update={"model": deep}).signed_by(SigningKey(bytes(32)))
    with pytest.raises(DilocoxError, match="layers"):
        Manifest.from_bytes(many.to_bytes(), run_id=many.run_id)
