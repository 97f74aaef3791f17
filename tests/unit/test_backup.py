"""A copy of another stage: proven or not there, on disk and on its way."""

import errno
import random
from contextlib import nullcontext
from pathlib import Path

import pytest

from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import ProtocolError
from dilocox_peer.peer.rounds.durable import LOST_VOTES_VIEWS, Durable, Votes
from dilocox_peer.peer.rounds.past import Certificates
from dilocox_peer.peer.rounds.patience import Patience
from dilocox_peer.peer.state import backup_store as backup_store_module
from dilocox_peer.peer.state.backup import (
    FOLLOWERS,
    NEAR_TRIES,
    Annals,
    followers,
    is_due,
    page_after,
    reached_with,
    rest_s,
    stages_to_keep,
    worth_asking,
)
from dilocox_peer.peer.state.backup_store import BackupStore
from dilocox_peer.peer.state.keeper import Keeper
from dilocox_peer.signing import SigningKey, verify
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.wire.chain import Certificate, decode_chain, encode_chain
from dilocox_peer.wire.checkpoints import Checkpoint, sign_checkpoint
from dilocox_peer.wire.declared import replaced
from tests.certified_stage import MANIFEST, OWNER, ROSTER, STAGE, CertifiedStage, annals_of, keep_in

LIMIT = 1 << 20


def test_what_verifies_is_taken_and_the_newest_named_states_are_offered_first() -> None:
    stage = CertifiedStage().rounds(5)
    annals = annals_of(stage.certificates[:3])
    annals.take(stage.certificates[3:])
    assert annals.place == stage.place
    named = [(state.head, state.digest) for state in stage.states[:-1]]  # nothing names the last one's yet
    assert annals.newest_proven() == named[:-4:-1]
    assert annals.digest_at(stage.states[-1].head) == b""
    assert annals.up_to(stage.states[2].head) == tuple(stage.certificates[:3])
    assert annals.round_at(stage.states[2].head) == 2
    assert annals.round_at(sha256(b"another head")) is None
    assert annals.signers_of(stage.states[2].head) == "3 of 3 peers"


def test_a_reader_comes_back_from_a_liars_chain_however_long_it_is() -> None:
    """Of one voter's rounds more than nobody may take back; the others were out of sight for a while."""
    annals = annals_of(CertifiedStage().rounds(3).seized(ROSTER[2]).rounds(30).certificates)
    assert annals.place.voters == (ROSTER[2],)
    honest = CertifiedStage().rounds(4)
    annals.take(honest.certificates)
    assert annals.place == honest.place
    with pytest.raises(ProtocolError, match="a branch"):
        annals.take(CertifiedStage().rounds(3).seized(ROSTER[2]).rounds(31).certificates)


def test_what_does_not_verify_changes_nothing() -> None:
    stage, other = CertifiedStage().rounds(4), CertifiedStage(first=0.5).rounds(2)
    annals = annals_of(stage.certificates[:3])
    forged = Certificate(STAGE, stage.certificates[3].parent, 1, 0, stage.certificates[3].value, ())
    for certificates, why in (
        ([forged], "no quorum"),
        ([stage.certificates[4]], "follow no head"),
        ([stage.certificates[3], stage.certificates[3]], "another parent"),
        (other.certificates[:2], "nobody of the roster"),  # verifies, and its signers went on elsewhere
    ):
        with pytest.raises(ProtocolError, match=why):
            annals.take(certificates)
        assert list(annals.certificates) == stage.certificates[:3]


def test_a_view_change_of_one_member_to_the_end_of_the_run_is_not_the_end() -> None:
    honest, lone = CertifiedStage().rounds(3), CertifiedStage().rounds(3).seized(ROSTER[0]).rounds(37)
    annals = Annals(MANIFEST, STAGE, verify, patience=Patience(30.0))
    annals.take(lone.certificates, now=0.0)
    assert list(annals.certificates) == honest.certificates
    assert not annals.is_over
    honest.rounds(37)
    annals.take(honest.certificates, now=29.0)
    assert annals.is_over
    with pytest.raises(ProtocolError, match=r"rounds back|counts less"):
        annals.take(lone.certificates, now=31.0)
    assert list(annals.certificates) == honest.certificates


def test_a_chain_longer_than_the_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dilocox_peer.peer.planning.plan.SPARE_VIEWS", -78)  # of 40 rounds two certificates are left
    stage = CertifiedStage().rounds(2)
    annals = annals_of(stage.certificates[:2])
    with pytest.raises(ProtocolError, match="more than 2 certificates"):
        annals.take(stage.certificates[2:])
    assert annals.place.height == 2


def test_a_branch_signed_later_replaces_ours_from_where_they_part() -> None:
    ours, theirs = CertifiedStage().rounds(2), CertifiedStage(first=7.0).rounds(5)
    annals = annals_of(ours.certificates)
    annals.take(theirs.certificates)
    assert annals.place == theirs.place


def test_pages_of_a_long_chain_make_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = CertifiedStage().rounds(20)
    monkeypatch.setattr("dilocox_peer.peer.state.backup.MAX_PAGE_BYTES", 6000)
    annals, pages = Annals(MANIFEST, STAGE, verify), 0
    while annals.place.height < len(stage.certificates):
        page = page_after(stage.certificates, annals.locator())
        raw = encode_chain(page)
        assert len(raw) <= 6000
        annals.take(decode_chain(raw, 6000))
        pages += 1
    assert pages > 3
    assert page_after(stage.certificates, annals.locator()) == []
    assert page_after(stage.certificates, [sha256(b"of another run")])[0] == stage.certificates[0]


def test_bytes_of_a_chain_are_read_whole_or_refused() -> None:
    stage, rng = CertifiedStage().rounds(2), random.Random(0)
    raw = encode_chain(stage.certificates)
    assert decode_chain(raw, LIMIT) == stage.certificates
    with pytest.raises(ProtocolError, match="at most"):
        decode_chain(raw, len(raw) - 1)
    for _ in range(300):
        mutated = bytearray(raw)
        for _ in range(rng.randint(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        annals = Annals(MANIFEST, STAGE, verify)
        try:
            annals.take(decode_chain(mutated[: rng.randint(1, len(mutated))], LIMIT))
        except ProtocolError:
            assert annals.place.is_genesis
        else:  # it changed what no signature covers: a ballot's number, nothing
            assert [each.head for each in annals.certificates] == [each.head for each in stage.certificates][
                : annals.place.height
            ]


def test_what_was_saved_is_loaded_with_its_proof(tmp_path) -> None:
    stage, store = CertifiedStage().rounds(4), BackupStore(tmp_path / "copy", MANIFEST, STAGE, verify)
    assert store.load() is None
    for last in (2, 4):
        annals = keep_in(store, stage.certificates[: last + 1], stage.states[last - 1])
        backup = store.load()
        assert backup is not None
        assert backup.state == stage.states[last - 1]
        assert backup.certificates == tuple(stage.certificates[:last])
        assert store.annals().place == annals.place
    assert len(list((tmp_path / "copy" / "checkpoints").iterdir())) == 1, "older ones are removed"


def test_killed_in_between_the_old_copy_is_there_and_a_damaged_one_is_none(tmp_path, monkeypatch) -> None:
    stage, store = CertifiedStage().rounds(4), BackupStore(tmp_path / "copy", MANIFEST, STAGE, verify)
    keep_in(store, stage.certificates[:3], stage.states[1])

    def killed(_durable: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("dilocox_peer.peer.rounds.journal.encode_record", killed)
        with pytest.raises(KeyboardInterrupt):
            keep_in(store, stage.certificates, stage.states[3])
    old = store.load()
    assert old is not None
    assert old.state == stage.states[1]
    log = tmp_path / "copy" / "chain.log"
    whole = log.read_bytes()
    for length in range(0, len(whole), 101):
        log.write_bytes(whole[:length])
        assert store.load() is None


@pytest.mark.parametrize("times", [1, 3])
def test_a_full_disk_while_another_branch_is_taken_over_leaves_the_old_copy_though_it_is_of_the_same_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    store = BackupStore(tmp_path / "copy", MANIFEST, STAGE, verify)
    old, new = CertifiedStage().rounds(4), CertifiedStage(2.0).rounds(4)
    assert old.states[3].round == new.states[3].round
    keep_in(store, old.certificates, old.states[3])

    def full(_self: object, _growth: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    for _ in range(times):
        with monkeypatch.context() as patched:
            patched.setattr(BackupStore, "write_chain", full)
            with pytest.raises(OSError, match="no room"):
                keep_in(store, new.certificates, new.states[3])
        found = store.load()
        assert found is not None
        assert found.state == old.states[3]
    for stage in (new, CertifiedStage(3.0).rounds(4)):
        keep_in(store, stage.certificates, stage.states[3])
        found = store.load()
        assert found is not None
        assert found.state == stage.states[3]
        assert len(list((tmp_path / "copy" / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize(
    "saves",
    [
        [("a", 2, ""), ("a", 3, "chain"), ("a", 4, "chain")],
        [("a", 2, ""), ("a", 2, "others"), ("b", 2, "others"), ("c", 2, "chain")],
        [("a", 2, ""), ("b", 2, "others"), ("b", 3, "chain")],
        [("a", 5, ""), ("b", 4, "chain"), ("b", 5, "chain")],
        [("a", 3, ""), ("b", 4, "chain"), ("b", 3, "chain"), ("c", 5, "chain")],
    ],
)
def test_saves_that_break_off_one_after_another_leave_the_copy_that_the_chain_proves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: list[tuple[str, int, str]]
) -> None:
    """Each of a branch, with its round: before the chain is written, or before the others go. The two newest files stayed, and none of them was proven."""
    stages = {name: CertifiedStage(float(number)).rounds(7) for number, name in enumerate("abc", start=1)}
    folder, expected = tmp_path / "copy", stages["a"].states[0]

    def ends(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    for name, number, ends_at in saves:
        stage, store = stages[name], BackupStore(folder, MANIFEST, STAGE, verify)
        with monkeypatch.context() as patched:
            if ends_at:
                owner = {"chain": BackupStore, "others": backup_store_module}[ends_at]
                patched.setattr(owner, {"chain": "write_chain", "others": "keep_only"}[ends_at], ends)
            with pytest.raises(OSError, match="no room") if ends_at else nullcontext():
                keep_in(store, stage.certificates[: number + 2], stage.states[number])
        if ends_at != "chain":
            expected = stage.states[number]
        found = store.load()
        assert found is not None, (name, number, ends_at)
        assert found.state == expected
        assert len(list((folder / "checkpoints").iterdir())) <= 2


def test_a_chain_that_grows_costs_what_has_come_and_its_older_part_stays_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dilocox_peer.peer.rounds.journal.COMPACT_BYTES", 8192)
    monkeypatch.setattr("dilocox_peer.peer.rounds.journal.KEPT", 6)
    stage, store = CertifiedStage().rounds(1), BackupStore(tmp_path / "copy", MANIFEST, STAGE, verify)
    annals = store.open()
    annals.take(stage.certificates)
    for number in range(60):
        annals.take(stage.rounds(1).certificates[-1:])
        growth = store.unwritten()
        assert growth is not None
        assert len(growth.appended) == (1 if number else 3)
        store.settle(store.write_chain(growth))
        assert store.unwritten() is None
    held = annals.certificates
    assert isinstance(held, Certificates)
    assert 0 < len(stage.certificates) - held.blocks[-1].stop < 40, "in memory"
    assert list(annals.as_it_is()) == list(held) == stage.certificates
    assert annals.place == stage.place
    assert annals.round_at(stage.states[3].head) == 3

    store.close()
    again = store.open()
    assert list(again.certificates) == stage.certificates
    assert isinstance(again.certificates, Certificates), "nor is it all in memory after a restart"
    again.give_up_after(stage.states[9].head)  # far back in the blocks
    growth = store.unwritten()
    assert growth is not None
    store.settle(store.write_chain(growth))
    store.close()
    assert store.annals().place.head == stage.states[9].head


def test_who_was_never_there_goes_on_and_who_voted_there_does_not_vote_twice(tmp_path) -> None:
    stage, store = CertifiedStage().rounds(3), BackupStore(tmp_path / "copy", MANIFEST, STAGE, verify)
    keep_in(store, stage.certificates, stage.states[2])
    backup = store.load()
    assert backup is not None
    for name, me, signed in (("new", PeerId("somebody"), 0), ("old", ROSTER[1], 1 + LOST_VOTES_VIEWS)):
        keeper = Keeper(tmp_path / name, MANIFEST, STAGE, lambda _event: None)
        assert keeper.is_empty
        keeper.adopt(backup, me=me)
        keeper.close()
        again = Keeper(tmp_path / name, MANIFEST, STAGE, lambda _event: None)
        for each in (keeper, again):
            assert not each.is_empty
            assert each.state == stage.states[2]
            assert each.durable is not None
            assert each.durable.appended == backup.certificates
            assert each.durable.votes.head == backup.state.head
            assert each.durable.votes.view_change_signed == signed
        again.close()


def test_who_goes_on_from_a_copy_forgets_no_head_that_it_left_and_no_word_of_the_owners(tmp_path) -> None:
    """What the rounds of this very process begin with, not only those after the next restart."""
    stage, store = CertifiedStage().rounds(3), BackupStore(tmp_path / "copy", MANIFEST, STAGE, verify)
    keep_in(store, stage.certificates, stage.states[2])
    backup, voted_at = store.load(), sha256(b"where it voted, and what it left for another branch")
    assert backup is not None
    first = stage.certificates[0]
    unsigned = Checkpoint(STAGE, MANIFEST.genesis(STAGE), 1, 0, first.head, 7, False)
    word = sign_checkpoint(unsigned, OWNER.sign)
    keeper = Keeper(tmp_path / "old", MANIFEST, STAGE, lambda _event: None)
    keeper.journal.write(Durable(0, (first,), Votes(first.head), word, (voted_at,)))
    keeper.close()
    keeper = Keeper(tmp_path / "old", MANIFEST, STAGE, lambda _event: None)
    keeper.adopt(backup, me=ROSTER[1])
    keeper.close()
    again = Keeper(tmp_path / "old", MANIFEST, STAGE, lambda _event: None)
    for each in (keeper, again):
        assert each.durable is not None
        assert (each.durable.left, each.durable.checkpoint) == ((voted_at,), word)
    again.close()


def test_copies_are_rare_enough_for_their_donor() -> None:
    assert is_due(1, None)
    assert [is_due(newest, 10) for newest in (10, 25, 26)] == [False, False, True]
    assert rest_s(2.0, {1: 1}, 0, 1, 1) == 20.0, "we alone copy from it: a tenth of the time"
    assert rest_s(2.0, {1: 4, 2: 2, 3: 2}, 0, 1, 1) == 20.0, "more donors than guardians"
    assert rest_s(2.0, {1: 1, 2: 7, 3: 4}, 0, 1, 1) == 80.0, "four of the twelve others copy from the one"


PEER = SigningKey(b"relay".ljust(32)).peer_id


def test_a_copy_is_taken_of_who_is_behind_the_same_line() -> None:
    def lease(name: str, host: str, site: str = "") -> Lease:
        key = SigningKey(name.encode().ljust(32)).peer_id
        direct = (f"/ip4/{where}/tcp/4000/p2p/{key}" for where in (host, "127.0.0.1"))
        texts = (*direct, f"/ip4/31.9.9.9/tcp/1/p2p/{PEER}/p2p-circuit/p2p/{key}")
        return Lease(key, 1, 1, texts, 1, 0.0, 0, "direct", 1, site=site)

    far, beside, named, other = (
        lease("a", "31.0.0.7"), lease("b", "31.0.0.9"), lease("c", "31.0.0.8", "attic"), lease("d", "31.0.0.6", "cellar"),
    )  # fmt: skip
    donors = [far, beside, named, other]

    def own(*hosts: str) -> list[str]:
        return [f"/ip4/{host}/tcp/4001/p2p/{PEER}" for host in (*hosts, "127.0.0.1")]

    ours = own("31.0.0.9", "192.168.1.4")
    assert worth_asking(donors, ours, "attic", in_vain=0) == [beside, named]
    assert worth_asking(donors, ours, "attic", in_vain=NEAR_TRIES - 1) == [beside, named], "its state has just gone by"
    assert worth_asking(donors, ours, "attic", in_vain=NEAR_TRIES) == [beside, named, far, other]
    assert worth_asking(donors, own("192.168.1.4"), "", in_vain=0) == donors
    assert worth_asking(donors, own("31.9.9.9"), "", in_vain=0) == donors, "a relay's address is not theirs"


def test_the_stage_with_the_fewest_peers_is_kept_and_kept_on() -> None:
    me = PeerId("me")
    assert stages_to_keep(0, {1: 3, 2: 1, 3: 2}, (), 2, me) == [2, 3]
    assert stages_to_keep(0, {1: 3, 2: 1, 3: 2}, (1,), 2, me) == [1, 2]
    assert stages_to_keep(2, {1: 0, 2: 1}, (), 3, me) == [], "nobody there to copy from"
    assert stages_to_keep(0, {1: 0}, (1,), 1, me) == [1]
    chosen = {stages_to_keep(0, {1: 1, 2: 1, 3: 1}, (), 1, PeerId(f"peer{number}"))[0] for number in range(30)}
    assert chosen == {1, 2, 3}, "not all peers keep the same"


def test_a_copy_leads_as_far_as_the_contributions_beside_it(tmp_path: Path) -> None:
    stage, store = CertifiedStage().rounds(6), BackupStore(tmp_path / "copy", MANIFEST, STAGE, verify)
    keep_in(store, stage.certificates[:4], stage.states[2])
    since = stage.certificates[3:]
    assert [each.value.round for each in since] == [3, 4, 5, 6]
    first = store.load()
    assert first is not None
    assert first.round == 2
    keep_in(store, stage.certificates[4:])
    shelf = Shelf(tmp_path / "shelf")
    blobs = [b"3", b"4", b"5", b"6"]
    certificates = [_with_one(each, sha256(blob)) for each, blob in zip(since, blobs, strict=True)]
    for blob in (b"3", b"4", b"6"):
        shelf.put(blob)
    assert [each.value.round for each in reached_with(certificates, shelf)] == [3, 4], (
        "what is behind a gap leads nowhere"
    )
    again = store.load()
    assert again is not None
    assert (again.round, again.state) == (2, stage.states[2])


def _with_one(certificate: Certificate, blob: Digest) -> Certificate:
    [entry, *_] = certificate.value.entries
    return replaced(certificate, value=replaced(certificate.value, entries=(replaced(entry, blob=blob),)))


def test_all_come_to_the_same_two_who_follow_a_stage_and_others_follow_another() -> None:
    peers = [PeerId(f"peer{number}") for number in range(20)]
    for stage in range(4):
        chosen = followers(stage, peers)
        assert chosen == followers(stage, peers[::-1])
        assert len(chosen) == FOLLOWERS
        assert followers(stage, [peer for peer in peers if peer != chosen[0]])[0] == chosen[1], (
            "the next takes its place"
        )
    assert len({tuple(followers(stage, peers)) for stage in range(4)}) > 1
    assert followers(0, peers[:1]) == peers[:1]
