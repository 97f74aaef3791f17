"""The owner's records of invitations: a use is on disk before its pass is handed out, and survives what happens to disks."""

import asyncio
import os
from typing import Any

import pytest

from dilocox_peer.admission import Gate, Grant, PassMaker, Revocations, Right
from dilocox_peer.errors import ConfigError, PeerUnavailable
from dilocox_peer.manifest import AdmissionSection, Manifest
from dilocox_peer.peer.desk import Desk, OwnerRecords
from dilocox_peer.signing import SigningKey
from dilocox_peer.wire.directives import Directive, sign_directive

OWNER, ME, OTHER, THIRD = (SigningKey(bytes([n]) * 32) for n in (1, 2, 3, 4))
MANIFEST = Manifest(admission=AdmissionSection(mode="invite")).signed_by(OWNER)
RUN = MANIFEST.run_id
ID = bytes(range(16))


def many(uses: int) -> Grant:
    return Grant(
        RUN, ID, frozenset({Right.JOIN}), 0, 2**33, None, uses
    ).signed_by(OWNER)  # fmt: skip


def desk_in(home) -> Desk:
    gate = Gate.of(MANIFEST)
    assert gate is not None
    return Desk.open(gate, OwnerRecords(home, RUN), OWNER)


def ask(desk: Desk, key: SigningKey, grant: Grant) -> dict[str, Any]:
    return asyncio.run(desk.admit(key.peer_id, {"grant": grant.to_bytes()})).header


def test_uses_survive_a_restart_and_the_same_peer_is_counted_once(tmp_path):
    desk = desk_in(tmp_path)
    first = ask(desk, ME, many(2))
    assert Grant.from_bytes(first["pass"]).peer == ME.peer_id
    assert ask(desk, ME, many(2)) == first
    desk.close()
    desk = desk_in(tmp_path)
    assert "pass" in ask(desk, OTHER, many(2))
    assert "used up" in ask(desk, THIRD, many(2))["refused"]
    assert ask(desk, ME, many(2)) == first
    desk.close()


def test_a_line_cut_short_by_a_power_cut_is_no_use_and_harms_no_later_one(tmp_path):
    desk = desk_in(tmp_path)
    ask(desk, ME, many(3))
    desk.close()
    file = OwnerRecords(tmp_path, RUN).folder / "redeemed"
    whole = file.read_text()
    file.write_text(whole + whole[:50])
    desk = desk_in(tmp_path)
    ask(desk, OTHER, many(3))
    desk.close()
    again = OwnerRecords(tmp_path, RUN).open_redeemed()
    assert again.used == {ID: {ME.peer_id, OTHER.peer_id}}
    again.close()


def test_a_disk_that_refuses_hands_out_no_pass_and_counts_nothing(tmp_path, monkeypatch):
    desk = desk_in(tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(PeerUnavailable, match="No space left"):
            ask(desk, ME, many(1))
    assert isinstance(desk.registrar, PassMaker)
    assert desk.registrar.is_new(many(1), ME.peer_id)
    desk.close()


def test_only_one_process_counts(tmp_path):
    desk = desk_in(tmp_path)
    with pytest.raises(ConfigError, match="another bootstrap"):
        desk_in(tmp_path)
    desk.close()
    desk_in(tmp_path).close()


def test_what_was_revoked_a_moment_ago_is_not_redeemed(tmp_path):
    desk, records = desk_in(tmp_path), OwnerRecords(tmp_path, RUN)
    records.write_revocations(Revocations(RUN, 0, ()).with_also(ID, 1).signed_by(OWNER))
    assert "revoked" in ask(desk, ME, many(2))["refused"]
    desk.close()


def test_records_that_are_not_the_owners_are_named(tmp_path):
    records = OwnerRecords(tmp_path, RUN)
    records.write_revocations(Revocations(RUN, 0, ()).with_also(ID, 1).signed_by(ME))
    with pytest.raises(ConfigError, match="did not sign: move it away"):
        desk_in(tmp_path)


@pytest.mark.parametrize("header", [{}, {"grant": 1}, {"grant": b""}, {"grant": b"x" * 5000}, {"grant": None}])
def test_a_request_without_an_invitation_is_refused(tmp_path, header):
    desk = desk_in(tmp_path)
    refused = asyncio.run(desk.admit(ME.peer_id, header)).header["refused"]
    assert "no invitation" in refused or refused.startswith("an invitation: ")
    desk.close()


# ---- what is revoked in two places, and on what disk ------------------------------------------------------------------


class FakeDirectory:
    def __init__(self, found: Revocations) -> None:
        self.found = found

    async def fetch_revocations(self) -> Revocations:
        return self.found

    async def publish_revocations(self, revocations: Revocations) -> None:
        self.found = revocations


@pytest.mark.parametrize("own_number", [1000, 3000])
def test_what_two_have_revoked_at_once_is_revoked_both(tmp_path, own_number):
    """The list with the lower number was lost, and with it whoever was in it alone."""
    records, desk = OwnerRecords(tmp_path, RUN), desk_in(tmp_path)
    here, there = bytes(31) + b"a", bytes(31) + b"b"
    records.write_revocations(Revocations(RUN, own_number, ((here, own_number),)).signed_by(OWNER))
    directory: Any = FakeDirectory(Revocations(RUN, 2000, ((there, 2000),)).signed_by(OWNER))
    for _ in range(2):
        asyncio.run(desk.beat(directory))
        for found in (
            desk.gate.revocations,
            directory.found,
            records.revocations(run_id=RUN, owner=OWNER.peer_id),
        ):
            assert set(found.by_target) == {here, there}
    assert directory.found.number == max(own_number, 2000) + 1, "once is enough"
    desk.close()


def test_a_newer_list_that_lacks_somebody_is_followed_by_one_that_does_not(tmp_path):
    """Peers go by numbers: the older list, though it had them all, would have been passed over."""
    records, desk = OwnerRecords(tmp_path, RUN), desk_in(tmp_path)
    a, b = bytes(31) + b"a", bytes(31) + b"b"
    records.write_revocations(Revocations(RUN, 1000, ((a, 900), (b, 1000))).signed_by(OWNER))
    directory: Any = FakeDirectory(Revocations(RUN, 2000, ((b, 1000),)).signed_by(OWNER))
    asyncio.run(desk.beat(directory))
    assert set(directory.found.by_target) == {a, b}
    assert directory.found.number == desk.gate.revocations.number == 2001
    desk.close()


def test_a_use_that_is_written_in_part_is_none(tmp_path, monkeypatch):
    """An invitation for one let in one peer more at each start."""
    desk, write = desk_in(tmp_path), os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, raw: write(fd, raw[:20]))
        with pytest.raises(PeerUnavailable, match="No space left"):
            ask(desk, ME, many(1))
    assert (OwnerRecords(tmp_path, RUN).folder / "redeemed").read_bytes() == b""
    assert "pass" in ask(desk, ME, many(1))
    assert "used up" in ask(desk, OTHER, many(1))["refused"]
    desk.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_what_root_writes_at_the_home_of_a_service_its_bootstrap_can_read_and_replace(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    OwnerRecords(home, RUN).write_revocations(Revocations(RUN, 1, ()).signed_by(OWNER))
    for each in (home / "admission", OwnerRecords(home, RUN).folder):
        assert each.stat().st_uid == 65534
    assert (OwnerRecords(home, RUN).folder / "revocations").stat().st_mode & 0o004


def test_what_was_said_elsewhere_is_written_where_it_is_newer_and_never_backwards(tmp_path):
    records, run = OwnerRecords(tmp_path, RUN), MANIFEST.digest
    first, second = (sign_directive(Directive(run, number), OWNER.sign) for number in (1, 2))
    other = sign_directive(Directive(run, 2, banned=(ME.peer_id,)), OWNER.sign)

    def there() -> Directive | None:
        return records.directive(run=run, owner=OWNER.peer_id)

    assert records.take_directive(second, OWNER.peer_id)
    assert not records.take_directive(first, OWNER.peer_id)
    assert not records.take_directive(second, OWNER.peer_id)
    assert there() == second
    assert records.take_directive(other, OWNER.peer_id), "of one number the one that bans counts"
    assert not records.take_directive(second, OWNER.peer_id)
    assert there() == other


def test_two_that_write_a_directive_at_once_do_not_lose_a_word(tmp_path):
    records, said = OwnerRecords(tmp_path, RUN), sign_directive(Directive(MANIFEST.digest, 7), OWNER.sign)
    with records.alone(), pytest.raises(ConfigError, match=r"another process writes .* try again"):
        OwnerRecords(tmp_path, RUN).take_directive(said, OWNER.peer_id)
    assert records.take_directive(said, OWNER.peer_id)
