"""What a peer does with slices: the outer loops of four peers and their desks, from offers to the next anchor; and what it refuses."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dilocox_peer.compression import slices
from dilocox_peer.compression.aggregate import contribution_norm
from dilocox_peer.compression.allowed import AllowedCodecs
from dilocox_peer.compression.contribution import encode_contribution
from dilocox_peer.compression.ladder import LADDER
from dilocox_peer.compression.policy import policy_named
from dilocox_peer.compression.slices import SliceInput, cut, joined, read_table
from dilocox_peer.errors import MalformedBlob
from dilocox_peer.peer.rounds.contract import AverageSlice, BlobPart, BlobRefused, SliceAveraged
from dilocox_peer.peer.training import slice_desk
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.peer.training.inner_reach import InnerReach
from dilocox_peer.peer.training.outer import OuterOptimizer, OuterSettings
from dilocox_peer.peer.training.slice_desk import SliceDesk
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import Digest, Layout, PeerId, TensorSpec, sha256
from dilocox_peer.wire.chain import Entry, SliceOutcome, inputs_of
from dilocox_peer.wire.declared import encode, replaced

LAYOUT = Layout((TensorSpec("w", (40, 30)), TensorSpec("b", (9,), "vector")))
SIZE, SLICES, PEERS = LAYOUT.num_elements, 4, 4


def head(number: int) -> Digest:
    return sha256(number.to_bytes(8, "big"))


class Peer:
    """An outer loop, its local parameters, a desk and a disk."""

    def __init__(self, number: int, folder: Path, codec: str) -> None:
        zeros = bytes(4 * SIZE)
        state = AnchorState.of(LAYOUT, head=head(0), round_number=0, anchor=zeros, momentum=zeros)
        self.outer = OuterOptimizer(OuterSettings(0.7, 0.6, policy_named(codec), slices=SLICES), state)
        self.local = torch.zeros(SIZE)
        self.blobs = Shelf(folder / str(number))
        self.desk = SliceDesk(LAYOUT, SLICES, norm_clip=4.0, blobs=self.blobs, allowed=AllowedCodecs(LADDER, 64))
        self.number = number
        self.codec, self.policy = codec, policy_named(codec)

    def offer(self, round_number: int, micro_batches: int = 8) -> tuple[Entry, list[bytes]]:
        generator = torch.Generator().manual_seed(100 * round_number + self.number)
        self.local += 0.01 * torch.randn(SIZE, generator=generator)
        own = self.outer.offer(self.local.clone(), micro_batches, codec_of=self.policy, sliced=True)
        blobs = [bytes(blob) for blob in (*own.slices, own.blob)]
        for blob in blobs:
            self.blobs.put(blob)
        return Entry(PeerId(f"p{self.number}"), 1, sha256(own.blob), sum(map(len, blobs)), own.micro_batches), blobs


def swarm(folder: Path, codec: str = "int4") -> list[Peer]:
    return [Peer(number, folder, codec) for number in range(PEERS)]


def averaged(peer: Peer, entries: list[Entry], index: int, base: bytes) -> SliceOutcome:
    (done,) = peer.desk.average(AverageSlice(inputs_of(entries), index, tuple(entries), base, peer.codec, 8))
    assert isinstance(done, SliceAveraged)
    assert done.outcome is not None
    return done.outcome


@pytest.mark.parametrize("codec", ["int4", "int2", "topk"])
def test_four_peers_come_to_one_anchor_by_results_and_lose_nothing(tmp_path: Path, codec: str) -> None:
    peers = swarm(tmp_path, codec)
    bases = [b""] * SLICES
    for round_number in range(1, 6):
        before_N = peers[0].outer.anchor_N.clone()
        offers = [peer.offer(round_number) for peer in peers]
        entries = [entry for entry, _ in offers]
        for peer in peers:
            for _, blobs in offers:
                for blob in blobs:
                    peer.blobs.put(blob)
        results: list[bytes] = []
        for index in range(SLICES):
            first, deputy = (peers[(index + rank) % PEERS] for rank in range(2))
            outcome = averaged(first, entries, index, bases[index])
            assert outcome == averaged(deputy, entries, index, bases[index])
            mapped = deputy.blobs.mapped(outcome.blob)
            assert mapped is not None
            results.append(bytes(mapped))
            bases[index] = outcome.residual
        digests = set()
        for peer in peers:
            moved, shift_N = peer.outer.merge(
                [memoryview(each) for each in results], [8] * PEERS, own=True, round_number=round_number,
                head=head(round_number), are_results=True,
            )  # fmt: skip
            peer.local += shift_N
            digests.add(moved.state_digest)
            assert (moved.norms, moved.clip_factors) == ((), ()), "not known, so not told"
        assert len(digests) == 1, "equal to the bit"
        assert not torch.equal(peers[0].outer.anchor_N, before_N)
    assert all(peer.outer.unsettled_micro_batches == 0 for peer in peers)


def test_what_was_offered_and_the_residual_add_up(tmp_path: Path) -> None:
    peer = swarm(tmp_path, "int2")[0]
    entry, blobs = peer.offer(1)
    wanted = -peer.local  # the anchor is 0: pseudo-gradient
    result = averaged(peer, [entry], 0, b"")
    results = [averaged(peer, [entry], index, b"").blob for index in range(SLICES)]
    assert results[0] == result.blob
    views = [peer.blobs.mapped(name) for name in results]
    peer.outer.merge(views, [8], own=True, round_number=1, head=head(1), are_results=True)  # type: ignore[arg-type]
    whole = cut(LAYOUT, SLICES)
    sent = torch.cat([v.clone() for _, _, v in joined(whole, blobs[:-1]).decode_into(torch.empty(1 << 19))])
    assert torch.allclose(sent + peer.outer.residual_N, wanted, atol=1e-6)


def test_a_whole_contribution_of_the_same_run_is_merged_where_three_are_left(tmp_path: Path) -> None:
    peers = swarm(tmp_path)[:3]
    blobs = []
    for peer in peers:
        peer.local += 0.01 * torch.randn(SIZE, generator=torch.Generator().manual_seed(peer.number))
        blobs.append(peer.outer.offer(peer.local.clone(), 8).blob)
    digests = {
        peer.outer.merge(blobs, [8] * 3, own=True, round_number=1, head=head(1))[0].state_digest for peer in peers
    }
    assert len(digests) == 1


def test_a_desk_takes_what_is_right_and_nothing_else(tmp_path: Path) -> None:
    peer, other = swarm(tmp_path)[:2]
    entry, blobs = other.offer(1)
    *slices, table = blobs
    peer.blobs.put(table)
    names = peer.desk.check(memoryview(table), BlobPart("table"))
    assert names == tuple(map(sha256, slices))
    for index, blob in enumerate(slices):
        assert peer.desk.check(memoryview(blob), BlobPart("slice", index, entry.blob)) == ()
        assert len(blob) <= peer.desk.max_bytes(BlobPart("slice", index, entry.blob))
        assert peer.desk.check(memoryview(blob), BlobPart("result", index)) == ()
    for blob, part in (
        (slices[0], BlobPart("table")),
        (slices[1], BlobPart("slice", 0, entry.blob)),
        (slices[1], BlobPart("result", 0)),
        (slices[0] + b"\0", BlobPart("result", 0)),
        (b"", BlobPart("slice", 0, entry.blob)),
        (b"\xff" * 8, BlobPart("residual", 0)),
    ):
        with pytest.raises(MalformedBlob):
            peer.desk.check(memoryview(blob), part)
    assert len(table) <= peer.desk.max_bytes(BlobPart("table"))


def test_a_slice_or_a_result_in_a_codec_that_the_run_does_not_use_is_refused(tmp_path: Path) -> None:
    peer, other = swarm(tmp_path)[0], Peer(1, tmp_path, "ecsq")
    entry, blobs = other.offer(1)
    for blob in blobs:
        peer.blobs.put(blob)
    with pytest.raises(MalformedBlob, match="in ecsq; in this run"):
        peer.desk.check(memoryview(blobs[0]), BlobPart("slice", 0, entry.blob))
    told = peer.desk.average(AverageSlice(inputs_of([entry]), 0, (entry,), b"", "int4", 8))
    assert isinstance(told[0], BlobRefused)
    assert "in ecsq; in this run" in told[0].reason
    assert peer.desk.check(memoryview(blobs[0]), BlobPart("result", 0)) == (), "the mean of topk's"
    fixed = SliceDesk(LAYOUT, SLICES, norm_clip=4.0, blobs=peer.blobs, allowed=AllowedCodecs(("int4",), 64))
    with pytest.raises(MalformedBlob, match="in ecsq; in this run"):
        fixed.check(memoryview(blobs[0]), BlobPart("result", 0))


def test_a_contribution_whose_table_lies_about_a_norm_is_refused_by_whoever_averages_it(tmp_path: Path) -> None:
    peer, liar = swarm(tmp_path)[:2]
    own, own_blobs = peer.offer(1)
    entry, blobs = liar.offer(1)
    table = read_table(blobs[-1], cut(LAYOUT, SLICES))
    parts = (replaced(table.parts[0], squared=table.parts[0].squared / 2), *table.parts[1:])
    lied = encode(replaced(table, parts=parts))
    for blob in (*blobs[:-1], lied):
        peer.blobs.put(blob)
    entries = [own, replaced(entry, blob=sha256(lied))]
    told = peer.desk.average(AverageSlice(inputs_of(entries), 0, tuple(entries), b"", "int4", 8))
    assert told == (
        BlobRefused(sha256(lied), "a slice of another norm than its table says"),
        SliceAveraged(inputs_of(entries), 0, None),
    )
    honest = peer.desk.average(AverageSlice(inputs_of(entries), 1, tuple(entries), b"", "int4", 8))
    assert isinstance(honest[0], SliceAveraged), "of another slice it says the truth"
    assert len(own_blobs) == SLICES + 1


def all_here(peers: list[Peer]) -> list[Entry]:
    """The entries of a round of theirs, whose blobs the first of them has checked and kept as they came."""
    offers, (first, *_) = [peer.offer(1) for peer in peers], peers
    for entry, blobs in offers:
        for blob in blobs:
            first.blobs.put(blob)
        for index, blob in enumerate(blobs[:-1]):
            first.desk.check(memoryview(blob), BlobPart("slice", index, entry.blob))
    return [entry for entry, _ in offers]


@pytest.mark.parametrize("codec", ["int4", "topk"])
def test_what_the_check_has_found_is_not_found_again_and_gives_the_same_result(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = swarm(tmp_path, codec)
    entries = all_here(peers)
    inputs = []
    for entry in entries:
        raw = peers[0].blobs.mapped(entry.blob)
        assert raw is not None
        table = read_table(raw, cut(LAYOUT, SLICES))
        blob = peers[0].blobs.mapped(table.parts[1].blob)
        assert blob is not None
        inputs.append(SliceInput(bytes(raw), tuple(part.squared for part in table.parts), blob, entry.micro_batches))
    anew = slices.average_slice(
        cut(LAYOUT, SLICES).slices[1], inputs, norm_clip=4.0, codec_of=policy_named(slices.RESULT_CODEC[codec]),
        residual=b"", beacon=inputs_of(entries), num_elements=SIZE,
    )  # fmt: skip
    monkeypatch.setattr(slices, "squares_of", None)
    assert averaged(peers[0], entries, 1, b"").blob == sha256(anew.blob)


@pytest.mark.parametrize(("most_bytes", "checks"), [(0, 2 * PEERS), (slice_desk.MAX_CHECKED_BYTES, 0)])
def test_what_is_known_of_slices_is_kept_within_so_many_bytes(
    tmp_path: Path, most_bytes: int, checks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_desk, "MAX_CHECKED_BYTES", most_bytes)
    peers, checked = swarm(tmp_path), list[int]()
    entries = all_here(peers)

    def check_part(*arguments: Any) -> Any:
        checked.append(1)
        return slices.check_part(*arguments)

    monkeypatch.setattr(slice_desk, "check_part", check_part)
    assert averaged(peers[0], entries, 1, b"") == averaged(peers[0], entries, 1, b"")
    assert len(checked) == checks


def test_what_is_gone_from_the_disk_is_told(tmp_path: Path) -> None:
    peer = swarm(tmp_path)[0]
    entry, blobs = peer.offer(1)
    none = SliceAveraged(inputs_of([entry]), 2, None)
    action = AverageSlice(inputs_of([entry]), 2, (entry,), sha256(b"a residual that nobody has"), "int4", 8)
    assert peer.desk.average(action) == (none,)
    peer.blobs.forget(sha256(blobs[2]))
    assert peer.desk.average(AverageSlice(inputs_of([entry]), 2, (entry,), b"", "int4", 8)) == (none,)


@pytest.mark.parametrize(("codec", "value"), [("int4", 1e33), ("none", 3e38), ("int4", 1.0)])
def test_a_result_that_is_further_than_any_round_can_come_is_refused(tmp_path: Path, codec: str, value: float) -> None:
    """Two accomplices say what a slice came to: any number was merged, or ended every merge after it."""
    reach = InnerReach(1e-3, 8, 8)
    desk = SliceDesk(
        LAYOUT, SLICES, norm_clip=4.0, blobs=Shelf(tmp_path), allowed=AllowedCodecs((codec,), 64), reach=reach
    )
    layout = cut(LAYOUT, SLICES).slices[0]

    def result(of: float) -> memoryview:
        return memoryview(encode_contribution(layout, torch.full((layout.num_elements,), of), policy_named(codec)))

    desk.check(result(0.008), BlobPart("result", 0))
    with pytest.raises(MalformedBlob, match="further than any round can come"):
        desk.check(result(value), BlobPart("result", 0))


REACH = InnerReach(1e-3, 8, 8)


def bounded(folder: Path, codec: str) -> list[Peer]:
    """Peers of a run whose inner optimizer is known to come so far and no further."""
    peers = swarm(folder, codec)
    for peer in peers:
        peer.desk = SliceDesk(
            LAYOUT, SLICES, norm_clip=4.0, blobs=peer.blobs, allowed=AllowedCodecs(LADDER, 64), reach=REACH
        )
    return peers


def residual_of(value: float) -> bytes:
    return np.full(cut(LAYOUT, SLICES).slices[0].num_elements, value, "<f4").tobytes()


@pytest.mark.parametrize("value", [3e38, 1e30, 10.0, 0.2])
def test_a_residual_that_is_further_than_any_encoding_can_lose_is_refused(tmp_path: Path, value: float) -> None:
    """Two accomplices vouch for it beside an honest result: whoever averaged the next one with it signed what they wished."""
    desk, part = bounded(tmp_path, "int4")[0].desk, BlobPart("residual", 0)
    desk.check(memoryview(residual_of(0.008)), part)
    for each in (value, -value):
        with pytest.raises(MalformedBlob, match="further than any encoding can lose"):
            desk.check(memoryview(residual_of(each)), part)


@pytest.mark.parametrize("codec", ["none", "int4", "int2", "topk"])
def test_nobody_vouches_for_a_result_that_the_others_refuse(tmp_path: Path, codec: str) -> None:
    """With such a residual at hand as without it: an averager does not fetch what it came to itself, and merged it."""
    peers, far = bounded(tmp_path, codec), residual_of(1e30)
    entries = all_here(peers)
    honest = averaged(peers[0], entries, 0, b"")
    peers[0].blobs.put(far)
    outcome = averaged(peers[0], entries, 0, sha256(far))
    assert outcome == honest
    assert outcome.base == b"", "it says so"
    near = residual_of(0.001)
    peers[0].blobs.put(near)
    assert averaged(peers[0], entries, 0, sha256(near)).base == sha256(near)


def test_what_an_encoding_has_lost_is_kept_within_what_others_take(tmp_path: Path) -> None:
    """Of two magnitudes more and more, where one element is far larger than its neighbours in every round: no honest residual is refused."""
    layout = cut(LAYOUT, SLICES).slices[0]
    values_N = torch.full((layout.num_elements,), 1e-3)
    values_N[::256] = 1.0
    blob, residual, lengths = encode_contribution(layout, values_N, policy_named("none")), b"", []
    squared = (contribution_norm(blob, layout) ** 2,)
    longest = 2.0 * math.sqrt(squared[0])
    for _ in range(12):
        made = slices.average_slice(
            layout, [SliceInput(b"", squared, blob, 8)], norm_clip=4.0, codec_of=policy_named("sign"), residual=residual,
            beacon=b"", longest_residual=longest,
        )  # fmt: skip
        residual = bytes(made.residual)
        slices.check_residual(residual, layout, longest)
        lengths.append(float(torch.frombuffer(bytearray(residual), dtype=torch.float32).norm()))
    assert max(lengths) > 0.75 * longest, "as much as may be is carried on"
    with pytest.raises(MalformedBlob):
        slices.check_residual(residual, layout, min(lengths) / 2)


def test_a_round_that_nobody_worked_for_moves_no_anchor(tmp_path: Path) -> None:
    """As all to all: momentum without a gradient would coast. And what encoding had lost before is not lost with its results."""
    peers, bases, anchors, digests = swarm(tmp_path), [b""] * SLICES, [], []
    for round_number, micro_batches in ((1, 8), (2, 0), (3, 8)):
        offers = [peer.offer(round_number, micro_batches) for peer in peers]
        entries = [entry for entry, _ in offers]
        for peer in peers:
            for _, blobs in offers:
                for blob in blobs:
                    peer.blobs.put(blob)
        outcomes = [averaged(peers[0], entries, index, bases[index]) for index in range(SLICES)]
        if not micro_batches:
            assert [outcome.residual for outcome in outcomes] == bases
        bases = [outcome.residual for outcome in outcomes]
        views = [view for outcome in outcomes if (view := peers[0].blobs.mapped(outcome.blob)) is not None]
        merged = [
            peer.outer.merge(
                views, [micro_batches] * PEERS, own=True, round_number=round_number, head=head(round_number), are_results=True
            )
            for peer in peers
        ]  # fmt: skip
        for peer, (_moved, shift_N) in zip(peers, merged, strict=True):
            peer.local += shift_N
        digests.append({moved.state_digest for moved, _ in merged})
        anchors.append(peers[0].outer.anchor_N.clone())
    first_N, idle_N, last_N = anchors
    assert torch.equal(first_N, idle_N)
    assert not torch.equal(idle_N, last_N)
    assert [len(each) for each in digests] == [1, 1, 1]
