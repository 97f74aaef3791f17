"""Contributions that push against the others, or have nothing in common with them: left out, alike on every peer, and no honest one with them."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from dilocox_peer.compression.aggregate import aggregate
from dilocox_peer.compression.agreement import SAMPLED, WHOLE, parts_by_agreement
from dilocox_peer.compression.contribution import encode_contribution, open_contribution
from dilocox_peer.compression.policy import policy_named
from dilocox_peer.compression.reader import GRAIN, PIECE
from dilocox_peer.types import Layout

LAYOUT = Layout.of([("w", (256, 192)), ("v", (64, 192)), ("norm", (192,))])
MINORITIES = [(count, hostile) for count in range(3, 12) for hostile in range(1, (count + 1) // 2)]
CODECS = ("none", "int8", "int4", "topk")


def honest(count: int, *, seed: int = 0, common: float = 0.5) -> list[Tensor]:
    """Pseudo-gradients of as many peers: what is common to them, and noise of each."""
    source = torch.Generator().manual_seed(seed)
    shared_N = torch.randn(LAYOUT.num_elements, generator=source)
    return [common * shared_N + torch.randn(LAYOUT.num_elements, generator=source) for _ in range(count)]


def blobs_of(contributions: Sequence[Tensor], codec: str = "int8") -> list[bytes]:
    return [bytes(encode_contribution(LAYOUT, each_N, policy_named(codec, rank=8))) for each_N in contributions]


def parts_of(contributions: Sequence[Tensor], codec: str = "int8") -> tuple[int, ...]:
    opened = [open_contribution(blob, LAYOUT) for blob in blobs_of(contributions, codec)]
    return parts_by_agreement(LAYOUT, opened, [8] * len(opened), b"head")


def found_of(contributions: Sequence[Tensor], codec: str = "int8") -> frozenset[int]:
    return frozenset(index for index, part in enumerate(parts_of(contributions, codec)) if part == 0)


def noise(count: int, length: float = 4.0) -> list[Tensor]:
    return [
        length * torch.randn(LAYOUT.num_elements, generator=torch.Generator().manual_seed(100 + number))
        for number in range(count)
    ]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("count", "hostile"), MINORITIES)
@pytest.mark.parametrize("length", [1.0, 4.0])
def test_what_turns_the_others_round_is_left_out(count: int, hostile: int, length: float, codec: str) -> None:
    good = honest(count - hostile)
    turned_N = -length * torch.stack(good).mean(0)
    assert found_of([*good, *[turned_N] * hostile], codec) == frozenset(range(len(good), count))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("common", [0.0, 0.1, 0.5])
def test_no_honest_contribution_is_left_out(seed: int, common: float) -> None:
    """Also where they agree in nothing, as late in a run, or where there are few of them."""
    for count in (2, 3, 5, 8):
        assert found_of(honest(count, seed=seed, common=common), "topk") == frozenset()


@pytest.mark.parametrize("codec", CODECS)
def test_who_turns_one_members_contribution_round_makes_no_outcast_of_it(codec: str) -> None:
    good = honest(6)
    assert found_of([*good, -good[0], -4.0 * good[0]], codec) == {6, 7}


def test_accomplices_that_agree_with_each_other_gain_nothing() -> None:
    good = honest(6, common=0.3)
    turned_N = -torch.stack(good).mean(0)
    assert found_of([turned_N, *good, turned_N]) == {0, 7}


@pytest.mark.parametrize(("count", "hostile"), [(4, 2), (2, 1), (8, 4)])
def test_of_two_halves_nobody_can_tell_which_is_right(count: int, hostile: int) -> None:
    good = honest(count - hostile)
    assert found_of([*good, *[-each_N for each_N in good[:hostile]]]) == frozenset()


def spike_of(good: Sequence[Tensor]) -> Tensor:
    """The signs of the others' mean at a thousandth of its length, and nearly all the length that the clip lets be in the smallest tensor."""
    mean_N = torch.stack(list(good)).mean(0)
    length = float(torch.stack([each_N.norm() for each_N in good]).median())
    start = LAYOUT.num_elements - 192
    spike_N = mean_N / 1000
    spike_N[start:] = mean_N[start:] / mean_N[start:].norm() * 3.9 * length
    return spike_N


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("others", [2, 4, 6])
def test_all_of_a_contributions_length_in_one_small_tensor_is_clipped_to_what_is_usual_there(
    others: int, codec: str
) -> None:
    good = honest(others)
    blobs = blobs_of([*good, spike_of(good)], codec)
    mean = aggregate(LAYOUT, blobs, [8] * len(blobs), norm_clip=4.0)
    alone = aggregate(LAYOUT, blobs[:-1], [8] * others, norm_clip=4.0)
    assert mean.mean_N is not None
    assert alone.mean_N is not None
    usual = torch.stack([each_N[-192:].norm() for each_N in good]).median()
    moved = (len(blobs) * mean.mean_N[-192:] - others * alone.mean_N[-192:]).norm()
    assert moved < 2.5 * usual, "as much as one of them may at most"
    assert all(0.9 < factor <= 1.0 for factor in mean.clip_factors[:-1])
    assert mean.clip_factors[-1] < 0.5, "and it is told"


def test_the_order_of_contributions_changes_nothing() -> None:
    good = honest(6)
    everybody = [*good, -good[3], -torch.stack(good).mean(0)]
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3)).tolist()
    found = found_of([everybody[place] for place in order])
    assert {order[index] for index in found} == {6, 7}


def test_a_large_stage_is_looked_at_in_part_and_nobody_knows_in_which_before() -> None:
    """What is turned round in a tensor that is not looked at costs nothing; which it is the certificate decides."""
    layout = Layout.of([(f"t{index}", (1024, 512)) for index in range(8)])
    good = [torch.randn(layout.num_elements) for _ in range(4)]
    shared_N = torch.randn(layout.num_elements)
    first = layout.num_elements // 8
    turned_N = shared_N.clone()
    turned_N[:first] *= -1.0
    contributions = [shared_N + each_N for each_N in good] + [4 * turned_N]
    opened = [
        open_contribution(bytes(encode_contribution(layout, each_N, policy_named("int8", rank=8))), layout)
        for each_N in contributions
    ]
    found = [parts_by_agreement(layout, opened, [8] * 5, bytes([number])) for number in range(24)]
    assert {parts[:4] for parts in found} == {(WHOLE,) * 4}
    assert sum(parts[4] == WHOLE for parts in found) > 12, "seven eighths of it agree"
    turned_N[: 7 * first] = -shared_N[: 7 * first]
    opened[-1] = open_contribution(
        bytes(encode_contribution(layout, 4 * turned_N, policy_named("int8", rank=8))), layout
    )
    found = [parts_by_agreement(layout, opened, [8] * 5, bytes([number])) for number in range(24)]
    assert sum(parts[4] == 0 for parts in found) > 12
    assert found == [parts_by_agreement(layout, opened, [8] * 5, bytes([number])) for number in range(24)]


class _Alike:
    """A contribution of one tensor whose pieces are as `usual`, but for those of `others`."""

    def __init__(self, usual_X: Tensor, others: Mapping[int, Tensor]) -> None:
        self._usual, self._others = usual_X, others

    def open(self, index: int) -> "_Alike":
        return self

    def read(self, start: int, stop: int, out_X: Tensor) -> None:
        out_X.copy_(self._others.get(start // PIECE, self._usual)[: stop - start])


def test_agreeing_in_a_sixteenth_does_not_help_who_has_the_sample_drawn_again_and_again() -> None:
    """A leader composes the head that draws the sample: it tries until the pieces that agree are in it."""
    source = torch.Generator().manual_seed(0)
    shared_X = torch.randn(PIECE, generator=source)
    good = [_Alike(0.5 * shared_X + torch.randn(PIECE, generator=source), {}) for _ in range(4)]
    hostile = _Alike(torch.randn(PIECE, generator=source), dict.fromkeys(range(0, 256, 16), shared_X))
    layout = Layout.of([("w", (256, PIECE))])
    parts = [parts_by_agreement(layout, [*good, hostile], [8] * 5, bytes([tried])) for tried in range(64)]
    assert all(each[:4] == (WHOLE,) * 4 for each in parts)
    assert max(each[4] for each in parts) < WHOLE, "all of it in none of them"
    assert sum(each[4] for each in parts) / len(parts) < 0.4 * WHOLE


def test_a_sample_is_of_all_parts_of_a_stage_and_reads_each_piece_once() -> None:
    read: list[tuple[int, int, int]] = []

    class Counted(_Alike):
        def open(self, index: int) -> _Alike:
            self.index = index
            return self

        def read(self, start: int, stop: int, out_X: Tensor) -> None:
            read.append((self.index, start, stop))
            super().read(start, stop, out_X)

    shapes = [("a", (7,)), ("empty", (0, 3)), ("b", (5, PIECE)), ("c", (3, 100_001)), ("d", (40, PIECE // 2))]
    layout = Layout.of(shapes)
    ones_X = torch.ones(PIECE)
    for _ in range(3):
        read.clear()
        parts_by_agreement(layout, [Counted(ones_X, {}), _Alike(ones_X, {}), _Alike(ones_X, {})], [8] * 3, b"x")
    assert len(read) == len(set(read)), "once"
    assert {index for index, _, _ in read} >= {2, 4}
    thirds = {3 * (layout.spans()[index][1] + start) // layout.num_elements for index, start, _ in read}
    assert thirds == {0, 1, 2}


def test_the_mean_is_that_of_the_others_to_the_bit() -> None:
    good = honest(5)
    blobs = blobs_of([*good, -4.0 * good[0]])
    weights = [8, 7, 9, 8, 8]
    mean = aggregate(LAYOUT, blobs, [*weights, 9], norm_clip=4.0)
    alone = aggregate(LAYOUT, blobs[:5], weights, norm_clip=4.0)
    assert mean.clip_factors == (*alone.clip_factors, 0.0)
    assert mean.mean_N is not None
    assert alone.mean_N is not None
    assert torch.equal(mean.mean_N, alone.mean_N)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("count", "hostile"), [(8, 1), (8, 2), (6, 2), (5, 1), (3, 1)])
def test_noise_weighs_next_to_nothing_and_the_others_all_that_they_did(codec: str, count: int, hostile: int) -> None:
    parts = parts_of([*honest(count - hostile), *noise(hostile)], codec)
    assert parts[: count - hostile] == (WHOLE,) * (count - hostile)
    assert max(parts[count - hostile :]) <= WHOLE // 8


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("common", [0.0, 0.1, 0.3, 1.0])
def test_honest_contributions_of_one_kind_keep_all_their_weight(seed: int, common: float) -> None:
    for count in (3, 4, 8):
        assert parts_of(honest(count, seed=seed, common=common)) == (WHOLE,) * count


def test_what_agrees_less_weighs_less_in_proportion() -> None:
    source = torch.Generator().manual_seed(9)
    shared_N = torch.randn(LAYOUT.num_elements, generator=source)
    parts = [
        parts_of(
            [
                *(0.5 * shared_N + torch.randn(LAYOUT.num_elements, generator=source) for _ in range(6)),
                common * shared_N + torch.randn(LAYOUT.num_elements, generator=source),
            ]
        )[-1]
        for common in (0.0, 0.06, 0.12, 0.18, 0.4)
    ]
    assert parts == sorted(parts)
    assert parts[0] <= 2
    assert 8 < parts[1] < parts[2] < parts[3] < WHOLE
    assert parts[4] == WHOLE


@pytest.mark.parametrize("seed", range(20))
def test_at_least_half_of_them_keep_all_whatever_the_others_are(seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    shared_N = torch.randn(LAYOUT.num_elements, generator=source)
    shares = torch.rand(9, generator=source) - 0.2
    parts = parts_of([share * shared_N + torch.randn(LAYOUT.num_elements, generator=source) for share in shares])
    assert 2 * parts.count(WHOLE) >= len(parts) - parts.count(0)


def test_the_mean_takes_a_part_of_a_weight_for_one_and_the_length_of_what_counts() -> None:
    good = honest(6)
    blobs = blobs_of([*good, *noise(1, 40.0)])
    mean = aggregate(LAYOUT, blobs, [8] * 7, norm_clip=4.0)
    alone = aggregate(LAYOUT, blobs[:6], [8] * 6, norm_clip=4.0)
    assert mean.mean_N is not None
    assert alone.mean_N is not None
    assert mean.clip_factors[:6] == (1.0,) * 6
    assert float((mean.mean_N - alone.mean_N).norm()) < 0.03 * float(alone.mean_N.norm())


@pytest.mark.parametrize("matched", [0, 300])
def test_what_lies_where_nobody_else_says_anything_agrees_with_nobody(matched: int) -> None:
    """Also with some elements that agree with the others in all of their signs."""
    source = torch.Generator().manual_seed(4)
    shared_N = torch.randn(LAYOUT.num_elements, generator=source)
    theirs_N = torch.rand(LAYOUT.num_elements, generator=source) < 0.2
    good = [theirs_N * (shared_N + torch.randn(LAYOUT.num_elements, generator=source)) for _ in range(6)]
    elsewhere_N = ~theirs_N * torch.randn(LAYOUT.num_elements, generator=source)
    places = torch.nonzero(theirs_N).squeeze()[:matched]
    elsewhere_N[places] = shared_N[places]
    parts = parts_of([*good, elsewhere_N], "none")
    assert parts[:6] == (WHOLE,) * 6
    assert parts[6] <= WHOLE // 16


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("count", "copies"), [(3, 2), (5, 4), (6, 2), (9, 8)])
def test_near_copies_weigh_as_one_and_take_nothing_from_the_others(count: int, copies: int, codec: str) -> None:
    """An element changed made a copy another contribution: four of nine left the other honest ones 0.4 of their weight."""
    good = honest(count)
    near = [good[0].clone() for _ in range(copies)]
    for number, each_N in enumerate(near):
        each_N[7 * number : 7 * number + 7] *= -1.0
    parts = parts_of([*good, *near], codec)
    assert parts[1:count] == parts_of(good, codec)[1:count] == (WHOLE,) * (count - 1)
    assert 0 < parts[0] + sum(parts[count:]) <= WHOLE


def test_peers_that_all_come_to_the_same_weigh_alike() -> None:
    same_N = honest(1)[0]
    parts = parts_of([same_N + 1e-3 * each_N for each_N in noise(4, 1.0)])
    assert len(set(parts)) == 1
    assert parts[0] > 0


class SpiedOn:
    """A contribution to one tensor, and how much of it is decoded."""

    def __init__(self, sign: float) -> None:
        self.sign, self.decoded = sign, 0

    def open(self, index: int) -> "SpiedOn":
        return self

    def read(self, start: int, stop: int, out_X: Tensor) -> None:
        self.decoded += stop - start
        out_X.fill_(self.sign)


def test_a_large_stage_is_decoded_where_its_sample_lies() -> None:
    """Of sparse contributions a whole piece for each run took as long as half of the mean."""
    layout = Layout.of([("w", (40, PIECE))])
    contributions = [SpiedOn(1.0), SpiedOn(1.0), SpiedOn(1.0), SpiedOn(-1.0)]
    assert parts_by_agreement(layout, contributions, [8] * 4, b"head")[3] == 0
    assert SAMPLED <= contributions[0].decoded <= 40 * 2 * GRAIN < 40 * PIECE
