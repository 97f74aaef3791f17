"""Who may come in: what an invitation is worth, to whom, until when; and that no bytes are more than refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.admission import (
    MAX_GRANT_CHARS,
    MAX_PASSES,
    MAX_TIME_MS,
    NOTHING_SHOWN,
    Gate,
    Grant,
    PassMaker,
    Revocations,
    Right,
)
from dilocox_peer.manifest import AdmissionSection, Manifest
from dilocox_peer.signing import SigningKey, public_key_of
from dilocox_peer.types import RunId, canonical
from dilocox_peer.wire.records import MAX_GRANT_BYTES, MAX_REVOCATIONS_BYTES, MAX_REVOKED, MAX_USES

NOW = 1_795_000_000.0
NOW_MS = int(NOW * 1000)
DAY_S = 86_400
OWNER, ME, OTHER, STRANGER = (SigningKey(bytes([n]) * 32) for n in (1, 2, 3, 4))
MANIFEST = Manifest(admission=AdmissionSection(mode="invite")).signed_by(OWNER)
RUN = MANIFEST.run_id
ID = bytes(range(16))

ANY_GRANT = st.builds(
    lambda run, grant_id, rights, issued_ms, expires_s, peer, uses, signature: Grant(
        RunId(run.hex()), grant_id, frozenset(rights), issued_ms, expires_s, peer, 0 if peer else uses, signature
    ),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=16, max_size=16),
    st.sets(st.sampled_from(Right), min_size=1),
    st.integers(0, MAX_TIME_MS),
    st.integers(0, MAX_TIME_MS),
    st.none() | st.sampled_from([ME.peer_id, OTHER.peer_id]),
    st.integers(1, MAX_USES),
    st.binary(min_size=64, max_size=64),
)


def grant_of(peer: SigningKey | None = ME, *, key: SigningKey = OWNER, uses: int = 0, **changed: object) -> Grant:
    grant = Grant(
        RUN, ID, frozenset({Right.JOIN}), NOW_MS - 1000, int(NOW) + DAY_S, peer.peer_id if peer else None, uses
    )
    return replace(grant, **changed).signed_by(key)  # type: ignore[arg-type]


def gate_of(manifest: Manifest = MANIFEST) -> Gate:
    gate = Gate.of(manifest)
    assert gate is not None
    return gate


def revoked(*targets: bytes, number: int = NOW_MS, key: SigningKey = OWNER) -> Revocations:
    entries = tuple(sorted((target, NOW_MS) for target in targets))
    return Revocations(RUN, number, entries).signed_by(key)


# -- bytes ------------------------------------------------------------------------------------------------------------


@given(ANY_GRANT)
def test_a_grant_survives_the_wire_and_the_link(grant: Grant) -> None:
    assert Grant.from_bytes(grant.to_bytes()) == grant
    assert Grant.from_text(grant.to_text()) == grant
    assert len(grant.to_bytes()) <= MAX_GRANT_BYTES
    assert len(grant.to_text()) <= MAX_GRANT_CHARS


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_but_value_error(raw: bytes) -> None:
    for read in (Grant.from_bytes, lambda each: Revocations.from_bytes(each, run_id=RUN, owner=OWNER.peer_id)):
        with pytest.raises(ValueError, match=r"."):
            read(raw)


@given(ANY_GRANT, st.integers(0, 300), st.integers(1, 255), st.integers(0, 300))
def test_no_change_of_a_grant_is_another_form_of_it(grant: Grant, place: int, flip: int, cut: int) -> None:
    raw = bytearray(grant.to_bytes())
    raw[place % len(raw)] ^= flip
    for changed in (bytes(raw), bytes(raw)[:cut], bytes(raw) + b"\xc0"):
        try:
            assert Grant.from_bytes(changed) != grant
        except ValueError:
            continue


@given(st.text(max_size=400))
def test_no_text_raises_anything_but_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Grant.from_text(text)


@pytest.mark.parametrize(
    "fields",
    [
        [True, bytes(32), ID, 2, 1, 1, b"", 1, bytes(64)],
        [1, bytes(31), ID, 2, 1, 1, b"", 1, bytes(64)],
        [1, bytes(32), ID, 0, 1, 1, b"", 1, bytes(64)],
        [1, bytes(32), ID, 4, 1, 1, b"", 1, bytes(64)],
        [1, bytes(32), ID, 2, -1, 1, b"", 1, bytes(64)],
        [1, bytes(32), ID, 2, 1, 2**60, b"", 1, bytes(64)],
        [1, bytes(32), ID, 2, 1, 1, b"", 0, bytes(64)],
        [1, bytes(32), ID, 2, 1, 1, bytes(32), 1, bytes(64)],
        [1, bytes(32), ID, 2, 1, 1, b"", MAX_USES + 1, bytes(64)],
        [1, bytes(32), ID, 2, 1, 1, b"", 1, bytes(63)],
        [1, bytes(32), ID, 2, 1, 1, b"", [1], bytes(64)],
        [2, bytes(32), ID, 2, 1, 1, b"", 1, bytes(64)],
        [[[[]]]],
        [],
    ],
)
def test_fields_that_no_grant_has_are_refused(fields: list[object]) -> None:
    with pytest.raises(ValueError, match="invitation"):
        Grant.from_bytes(canonical(fields))


def test_a_grant_of_a_newer_version_says_who_must_update() -> None:
    raw = grant_of().to_bytes()
    with pytest.raises(ValueError, match="an invitation of version 2, this peer speaks 1: this peer must update"):
        Grant.from_bytes(raw[:1] + b"\x02" + raw[2:])


def test_nesting_without_end_is_refused() -> None:
    for raw in (b"\x91" * 250, b"\x99" * 250):
        with pytest.raises(ValueError, match="an invitation"):
            Grant.from_bytes(raw)
    with pytest.raises(ValueError, match="a list of revocations"):
        Revocations.from_bytes(b"\x91" * MAX_REVOCATIONS_BYTES, run_id=RUN, owner=OWNER.peer_id)


# -- what an invitation is worth --------------------------------------------------------------------------------------


def test_who_has_shown_a_pass_may_do_what_it_allows() -> None:
    gate = gate_of()
    assert gate.refusal(ME.peer_id, Right.JOIN, NOW) == f"it {NOTHING_SHOWN}"
    assert gate.show(ME.peer_id, grant_of().to_bytes(), NOW) is None
    assert gate.refusal(ME.peer_id, Right.JOIN, NOW) is None
    assert gate.refusal(ME.peer_id, Right.READ, NOW) is None, "who joins fetches state first"
    assert gate.refusal(OTHER.peer_id, Right.READ, NOW) == f"it {NOTHING_SHOWN}"


def test_who_may_read_may_not_join() -> None:
    gate = gate_of()
    reader = grant_of(rights=frozenset({Right.READ}))
    assert gate.show(ME.peer_id, reader.to_bytes(), NOW) is None
    assert gate.refusal(ME.peer_id, Right.READ, NOW) is None
    assert "allows reading" in str(gate.refusal(ME.peer_id, Right.JOIN, NOW))


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        (grant_of(OTHER), "for another peer"),
        (grant_of(run_id=RunId("ab" * 32)), "for another run"),
        (grant_of(key=STRANGER), "not signed by the run's owner"),
        (grant_of(expires_s=int(NOW)), "expired on 2026-11-18"),
        (grant_of(None, uses=5), "for many"),
        (replace(grant_of(), expires_s=int(NOW) + 2 * DAY_S), "not signed"),
    ],
)
def test_a_pass_that_is_worth_nothing_is_refused_with_the_reason(shown: Grant, reason: str) -> None:
    gate = gate_of()
    assert reason in str(gate.show(ME.peer_id, shown.to_bytes(), NOW))
    assert gate.refusal(ME.peer_id, Right.READ, NOW) == f"it {NOTHING_SHOWN}", "nothing is learned of it"


def test_a_pass_expires_while_its_peer_is_in() -> None:
    gate = gate_of()
    gate.show(ME.peer_id, grant_of().to_bytes(), NOW)
    assert gate.is_out(ME.peer_id, NOW) is None
    assert "expired" in str(gate.is_out(ME.peer_id, NOW + DAY_S))
    assert gate.is_out(OTHER.peer_id, NOW) is None, "nothing is known of it"


def test_the_owner_needs_no_invitation() -> None:
    assert gate_of().refusal(OWNER.peer_id, Right.JOIN, NOW) is None


def test_an_older_pass_that_comes_later_does_not_replace_a_newer() -> None:
    gate = gate_of()
    newer, older = grant_of(), grant_of(issued_ms=NOW_MS - 9000, rights=frozenset({Right.READ}))
    for shown in (older, newer, older):
        assert gate.show(ME.peer_id, shown.to_bytes(), NOW) is None
    assert gate.refusal(ME.peer_id, Right.JOIN, NOW) is None


def test_a_good_pass_replaces_a_newer_that_is_worth_nothing_any_more() -> None:
    gate = gate_of()
    gate.show(ME.peer_id, grant_of().to_bytes(), NOW)
    gate.take(revoked(ID))
    older = grant_of(issued_ms=NOW_MS - 9000, grant_id=b"another" + bytes(9))
    assert gate.show(ME.peer_id, older.to_bytes(), NOW) is None
    assert gate.refusal(ME.peer_id, Right.JOIN, NOW) is None


def test_a_gate_keeps_so_many_passes() -> None:
    gate = gate_of()
    for number in range(MAX_PASSES + 10):  # a signature each would take long: what is kept is what matters
        gate.passes[SigningKey(number.to_bytes(32, "big")).peer_id] = grant_of()
    gate.show(ME.peer_id, grant_of().to_bytes(), NOW)
    assert len(gate.passes) == MAX_PASSES
    assert gate.refusal(ME.peer_id, Right.JOIN, NOW) is None


# -- taken back -------------------------------------------------------------------------------------------------------


def test_a_revoked_invitation_takes_its_passes_with_it() -> None:
    gate = gate_of()
    gate.show(ME.peer_id, grant_of().to_bytes(), NOW)
    assert gate.take(revoked(ID))
    assert "revoked" in str(gate.refusal(ME.peer_id, Right.JOIN, NOW))
    assert "revoked" in str(gate.is_out(ME.peer_id, NOW))
    assert gate.out(NOW) == [ME.peer_id]
    assert "revoked" in str(gate.show(ME.peer_id, grant_of().to_bytes(), NOW))


def test_a_peer_that_was_put_out_comes_back_by_a_newer_invitation_alone() -> None:
    gate = gate_of()
    gate.take(revoked(public_key_of(ME.peer_id)))
    assert "put out" in str(gate.show(ME.peer_id, grant_of().to_bytes(), NOW))
    many = grant_of(None, uses=5)
    registrar = PassMaker(gate, OWNER, {})
    assert "put out" in str(registrar.refusal(many, ME.peer_id, NOW)), "not by another of the old ones either"
    assert registrar.refusal(many, OTHER.peer_id, NOW) is None
    assert gate.show(ME.peer_id, grant_of(issued_ms=NOW_MS + 1).to_bytes(), NOW) is None


def test_revocations_go_by_their_number() -> None:
    gate = gate_of()
    assert gate.take(revoked(ID, number=5))
    assert not gate.take(revoked(number=5))
    assert not gate.take(revoked(number=4)), "an old list that somebody kept"
    assert gate.take(revoked(number=6))


def test_revocations_are_the_owners_of_this_run() -> None:
    good = revoked(ID, public_key_of(ME.peer_id))
    assert Revocations.from_bytes(good.to_bytes(), run_id=RUN, owner=OWNER.peer_id) == good
    for raw, run_id in (
        (revoked(ID, key=STRANGER).to_bytes(), RUN),
        (good.to_bytes(), RunId("ab" * 32)),
        (replace(good, number=7).to_bytes(), RUN),
        (replace(good, entries=good.entries[::-1]).signed_by(OWNER).to_bytes(), RUN),
        (replace(good, entries=((b"short", 1),)).signed_by(OWNER).to_bytes(), RUN),
    ):
        with pytest.raises(ValueError, match="revocations"):
            Revocations.from_bytes(raw, run_id=run_id, owner=OWNER.peer_id)


def test_the_longest_list_fits_and_no_longer_one_is_written() -> None:
    full = Revocations(RUN, 1, ())
    for number in range(MAX_REVOKED):
        full = full.with_also(number.to_bytes(32, "big"), MAX_TIME_MS - MAX_REVOKED + number)
    raw = full.signed_by(OWNER).to_bytes()
    assert len(raw) <= MAX_REVOCATIONS_BYTES
    assert len(Revocations.from_bytes(raw, run_id=RUN, owner=OWNER.peer_id).entries) == MAX_REVOKED
    with pytest.raises(ValueError, match="no more fit"):
        full.with_also(ID, NOW_MS)


def test_lists_written_in_two_places_are_put_together() -> None:
    again = Revocations(RUN, 0, ()).with_also(ID, 90)
    for one, other in ((again, Revocations(RUN, 0, ((ID, 10),))), (Revocations(RUN, 0, ((ID, 10),)), again)):
        assert one.with_also(bytes(32), 95, others=other.entries).by_target[ID] == 90, "put out twice, it was let in"
    here, there = Revocations(RUN, 0, ()).with_also(ID, 10), Revocations(RUN, 0, ()).with_also(bytes(16), 20)
    both = here.with_also(bytes(32), 30, others=there.entries)
    assert set(both.by_target) == {ID, bytes(16), bytes(32)}
    assert both.number > max(here.number, there.number)


# -- for many ---------------------------------------------------------------------------------------------------------


def test_an_invitation_for_many_is_used_up() -> None:
    gate = gate_of()
    registrar, many = PassMaker(gate, OWNER, {}), grant_of(None, uses=2)
    for key in (ME, OTHER):
        assert registrar.refusal(many, key.peer_id, NOW) is None
        assert registrar.is_new(many, key.peer_id)
        own = registrar.redeem(many, key.peer_id)
        assert gate.show(key.peer_id, own.to_bytes(), NOW) is None
        assert own.expires_s == many.expires_s
    assert "used up: it was for 2 peers" in str(registrar.refusal(many, STRANGER.peer_id, NOW))
    assert registrar.refusal(many, ME.peer_id, NOW) is None, "its own pass, again"
    assert not registrar.is_new(many, ME.peer_id)
    assert registrar.redeem(many, ME.peer_id).peer == ME.peer_id


def test_what_was_used_before_a_restart_stays_used() -> None:
    registrar = PassMaker(gate_of(), OWNER, {ID: {ME.peer_id, OTHER.peer_id}})
    assert "used up" in str(registrar.refusal(grant_of(None, uses=2), STRANGER.peer_id, NOW))
    assert registrar.refusal(grant_of(None, uses=3), STRANGER.peer_id, NOW) is None


@pytest.mark.parametrize(
    ("brought", "reason"),
    [
        (grant_of(None, uses=2, run_id=RunId("ab" * 32)), "another run"),
        (grant_of(None, uses=2, expires_s=int(NOW) - 1), "expired"),
        (grant_of(None, uses=2, key=STRANGER), "not signed"),
        (replace(grant_of(None, uses=2), uses=9), "not signed"),
    ],
)
def test_what_is_no_invitation_to_the_run_is_not_redeemed(brought: Grant, reason: str) -> None:
    assert reason in str(PassMaker(gate_of(), OWNER, {}).refusal(brought, ME.peer_id, NOW))


# -- a list -----------------------------------------------------------------------------------------------------------


def test_a_listed_peer_needs_nothing_and_others_an_invitation() -> None:
    listed = AdmissionSection(mode="list", members=(ME.peer_id,))
    manifest = Manifest(admission=listed).signed_by(OWNER)
    gate = gate_of(manifest)
    assert gate.refusal(ME.peer_id, Right.JOIN, NOW) is None
    assert f"not on the run's list, and {NOTHING_SHOWN}" in str(gate.refusal(OTHER.peer_id, Right.READ, NOW))
    assert gate.is_out(OTHER.peer_id, NOW) is None, "a bootstrap is on no list, and may be asked"
    own = replace(grant_of(OTHER), run_id=manifest.run_id).signed_by(OWNER)
    assert gate.show(OTHER.peer_id, own.to_bytes(), NOW) is None, "the owner may invite who is not listed"
    assert gate.refusal(OTHER.peer_id, Right.JOIN, NOW) is None
    gate.take(Revocations(manifest.run_id, 1, ((public_key_of(ME.peer_id), NOW_MS),)))
    assert "put out" in str(gate.refusal(ME.peer_id, Right.JOIN, NOW))
    assert "put out" in str(gate.is_out(ME.peer_id, NOW))
    assert gate.out(NOW) == [ME.peer_id]
    back = replace(grant_of(ME), run_id=manifest.run_id, issued_ms=NOW_MS + 1).signed_by(OWNER)
    assert gate.show(ME.peer_id, back.to_bytes(), NOW) is None
    assert gate.refusal(ME.peer_id, Right.JOIN, NOW) is None, "the owner took it back"


def test_who_holds_the_owners_key_lets_itself_in() -> None:
    gate = gate_of()
    own = PassMaker(gate, OWNER, {}).own_pass(OTHER.peer_id, NOW)
    assert gate_of().show(OTHER.peer_id, own.to_bytes(), NOW) is None


def test_an_open_run_has_no_gate() -> None:
    assert Gate.of(Manifest().signed_by(OWNER)) is None
