"""Which bodies of neighbours are not like the others', and that honest ones are."""

import random
from statistics import median

import pytest
import torch

from dilocox_peer.config import preset
from dilocox_peer.manifest import ModelSection
from dilocox_peer.model.activations import BodyFormat
from dilocox_peer.model.architecture import StageModel, build_model, layers_of
from dilocox_peer.model.body_sizes import Form
from dilocox_peer.model.partition import with_cut
from dilocox_peer.model.passes import Passes
from dilocox_peer.model.transformer import initial_parameters
from dilocox_peer.pipeline.likeness import FAR, FRESH_S, LEAST_SEEN, MAX_PEERS, MOST, PASSED, Likeness
from dilocox_peer.types import PeerId

HONEST = [PeerId(f"honest {number}") for number in range(3)]
LIAR = PeerId("liar")


def seen(peers: list[PeerId], rng: random.Random, count: int = 20) -> Likeness:
    likeness = Likeness("a gradient")
    for _ in range(count):
        for peer in peers:
            assert likeness.why_not(peer, 0.01 * rng.lognormvariate(0.0, 0.3), 0.0) is None
    return likeness


def test_who_sends_much_more_than_the_others_is_refused_and_told_what_is_usual() -> None:
    likeness = seen(HONEST, random.Random(1))
    assert likeness.why_not(LIAR, 0.01, 0.0) is None
    reason = likeness.why_not(LIAR, 1.0, 0.0)
    assert reason is not None
    assert reason.startswith("a gradient of strength 1, where 0.0")
    assert likeness.why_not(HONEST[0], 0.01, 0.0) is None


def test_nobody_raises_what_is_usual_by_sending_more_and_more() -> None:
    likeness = seen(HONEST, random.Random(2))
    strength, taken = 0.01, 0.01
    for _ in range(1000):
        strength *= 1.05
        if likeness.why_not(LIAR, strength, 0.0) is None:
            taken = strength
        else:
            strength = taken
    assert taken <= 1.2 * MOST * 0.01


@pytest.mark.parametrize("num_honest", [1, 2, 3])
def test_nobody_has_others_refused_by_sending_next_to_nothing(num_honest: int) -> None:
    honest = HONEST[:num_honest]
    likeness = seen(honest, random.Random(3))
    for _ in range(100):
        likeness.why_not(LIAR, 1e-9, 0.0)
        for peer in honest:
            assert likeness.why_not(peer, 0.01, 0.0) is None


def test_of_two_none_doubles_what_it_sends_without_end() -> None:
    likeness = seen(HONEST[:1], random.Random(4))
    strength = 0.01
    for _ in range(400):
        if likeness.why_not(LIAR, 2 * strength, 0.0) is None:
            strength *= 2
    assert strength <= 1.2 * MOST * FAR * 0.01
    assert likeness.why_not(HONEST[0], 0.01, 0.0) is None


def test_activations_of_next_to_nothing_are_refused_and_gradients_of_it_are_not() -> None:
    activations, gradients = Likeness("activations", refuses_weak=True), Likeness("a gradient")
    for likeness in (activations, gradients):
        for _ in range(LEAST_SEEN):
            assert likeness.why_not(HONEST[0], 0.01, 0.0) is None
    for strength in (0.0, 0.99 * 0.01 / FAR):
        assert (
            activations.why_not(LIAR, strength, 0.0) == f"activations of strength {strength:.2g}, where 0.01 is usual"
        )
        assert gradients.why_not(LIAR, strength, 0.0) is None
        assert activations.why_not(HONEST[0], strength, 0.0) is not None, "whoever was honest so far"
    assert activations.why_not(LIAR, 1.01 * 0.01 / FAR, 0.0) is None


def test_of_two_a_newcomer_is_compared_with_the_other() -> None:
    likeness = seen(HONEST[:1], random.Random(4))
    assert likeness.why_not(LIAR, 1.0, 0.0) is not None


def test_a_single_neighbour_is_compared_with_its_own_past() -> None:
    likeness = Likeness("a gradient")
    for _ in range(LEAST_SEEN):
        assert likeness.why_not(LIAR, 0.01, 0.0) is None
    assert likeness.why_not(LIAR, 1.0, 0.0) is not None
    strength = 0.01
    for _ in range(400):  # training goes on, and gradients change as it does
        strength *= 1.02
        assert likeness.why_not(LIAR, strength, 0.0) is None


def test_peers_that_are_gone_do_not_have_those_refused_that_are_there() -> None:
    likeness = seen(HONEST[1:], random.Random(5))  # the last that these sent was at 0.0
    now, strength = 0.0, 0.01
    while strength < 2 * MOST * 0.01:  # training goes on for an hour without them
        now, strength = now + 60.0, strength * 1.1
        assert likeness.why_not(HONEST[0], strength, now) is None or now < FRESH_S
    assert likeness.why_not(LIAR, 2 * MOST * strength, now) is not None


def test_bodies_of_nothing_do_not_say_what_is_usual() -> None:
    likeness = Likeness("a gradient")
    for _ in range(10):
        assert likeness.why_not(LIAR, 0.0, 0.0) is None
    assert likeness.why_not(HONEST[0], 5.0, 0.0) is None


def test_what_is_remembered_is_bounded() -> None:
    likeness = Likeness("activations")
    for number in range(4 * MAX_PEERS):
        for _ in range(LEAST_SEEN):
            likeness.why_not(PeerId(f"peer {number}"), 1.0, 0.0)
    assert likeness.num_known == MAX_PEERS


@pytest.mark.parametrize("form", ["int8", "bf16", "fp32"])
def test_the_strength_of_a_body_is_that_of_its_values(form: Form) -> None:
    body = BodyFormat(form, 2, 16, 256, 300)
    hidden_BTD = torch.randn(2, 16, 256, generator=torch.Generator().manual_seed(1))
    packed = body.pack_hidden(hidden_BTD)
    rms = float(hidden_BTD.square().mean().sqrt())
    found = body.strength(packed)
    assert rms * 0.99 <= found <= rms * (4.0 if form == "int8" else 1.01)
    assert body.strength(body.pack_hidden(100 * hidden_BTD)) == pytest.approx(100 * found, rel=0.02)


@pytest.mark.parametrize("form", ["int8", "bf16", "fp32"])
def test_a_halved_body_is_half_of_it_in_every_value(form: Form) -> None:
    body = BodyFormat(form, 2, 16, 256, 300)
    rng = torch.Generator().manual_seed(2)
    targets = body.pack_targets(torch.randint(0, 300, (2, 16), generator=rng))
    packed = body.pack_hidden(torch.randn(2, 16, 256, generator=rng)) + targets
    halved = body.halved(packed, 2)
    whole, quarter = (body.unpack_hidden(each, torch.device("cpu")) for each in (packed, halved))
    assert torch.equal(quarter, whole / 4)
    assert bytes(body.targets_of(halved)) == targets
    assert body.why_not(halved, is_step=True) is None


def test_what_is_taken_is_at_most_so_strong_that_what_it_is_passed_on_as_is_taken_too() -> None:
    likeness = seen(HONEST, random.Random(4))
    for strength in (0.001, 0.03, 0.045, 0.06, 0.078):
        assert likeness.why_not(LIAR, strength, 0.0) is None
        times = likeness.halvings(LIAR, strength, 0.0)
        assert strength / 2**times <= 1.1 * PASSED * 0.01
        assert times == 0 or strength / 2 ** (times - 1) > 0.9 * PASSED * 0.01
    assert Likeness("a gradient").halvings(LIAR, 5.0, 0.0) == 0


def test_an_honest_peer_is_not_refused_for_what_a_liar_behind_it_makes_too_strong() -> None:
    """Three stages that compute: one of the callees of an honest peer of the middle sends it gradients just below what it takes."""
    torch.manual_seed(1)
    manifest = with_cut(
        preset("tiny", model={"layers": 3}, inner={"micro_batch": 1}, stages={"count": 3}),
    )
    assert isinstance(manifest.model, ModelSection)
    body, models = BodyFormat.of(manifest), list[StageModel]()
    for stage in range(3):
        model = build_model(manifest.model, layers_of(manifest, stage))
        with torch.no_grad():
            model.flat_N.copy_(initial_parameters(model.layout, manifest.model, 7))
        models.append(model)
    first, middle, last = (Passes(body) for _ in range(3))
    rng = torch.Generator().manual_seed(3)
    at_middle, at_first = Likeness("a gradient"), Likeness("a gradient")
    honest, usual, refused, made_strong = PeerId("honest in the middle"), list[float](), 0, 0

    def answered(peer: PeerId, number: int) -> bytes:
        """What a callee of the last stage sends for a new micro-batch."""
        text = torch.randint(97, 105, (1, manifest.model.context + 1), generator=rng)
        step = middle.forward(number, models[1], first.begin(number, models[0], text[:, :-1], text[:, 1:]))
        first.release(number)
        gradient, _ = last.turn(models[2], step)
        if peer == LIAR and number > 30:
            strong = body.unpack_hidden(gradient, torch.device("cpu")) * (7.5 * median(usual) / body.strength(gradient))
            return body.pack_hidden(strong)
        usual.append(body.strength(gradient))
        return gradient

    for number in range(120):
        callee = (HONEST[0], HONEST[1], LIAR)[number % 3]
        gradient = answered(callee, number)
        strength = body.strength(gradient)
        assert at_middle.why_not(callee, strength, number) is None
        times = at_middle.halvings(callee, strength, number)
        made_strong += times > 0
        back = middle.backward(number, body.halved(gradient, times))
        assert back is not None
        refused += at_first.why_not(honest, body.strength(back), number) is not None
        for other in (PeerId("another"), PeerId("a third")):
            back = middle.backward(number, answered(HONEST[0], number))
            assert back is not None
            assert at_first.why_not(other, body.strength(back), number) is None
    assert refused == 0
    assert made_strong == 30, "of the liar, and of nobody else"


@pytest.mark.parametrize("refuses_weak", [True, False])
@pytest.mark.parametrize("strength", [1e-6, 0.0002])
def test_newcomers_by_free_names_do_not_have_one_refused_that_was_here_before(
    refuses_weak: bool, strength: float
) -> None:
    likeness = Likeness("what is sent", refuses_weak=refuses_weak)
    for second in range(30):
        assert likeness.why_not(HONEST[0], 0.01, float(second)) is None
    for number in range(5):
        for _ in range(LEAST_SEEN):
            likeness.why_not(PeerId(f"new {number}"), strength, 40.0)
        assert likeness.why_not(HONEST[0], 0.01, 50.0) is None
    assert likeness.why_not(HONEST[0], 1.1 * MOST * 0.01, 50.0) is not None, "its past is no leave for more"


def test_what_a_peer_sent_is_forgotten_with_its_link() -> None:
    """One after the other, strangers made next to nothing usual, and had all that were honest refused for ten minutes."""
    likeness = seen(HONEST[:2], random.Random(5))
    for number in range(8):
        stranger = PeerId(f"stranger {number}")
        for _ in range(LEAST_SEEN):
            assert likeness.why_not(stranger, 1e-9, 0.0) is None
        likeness.forget(stranger)
    for peer in HONEST[:2]:
        assert likeness.why_not(peer, 0.01, 0.0) is None


@pytest.mark.parametrize(
    ("refuses_weak", "first"), [(True, 1e-3), (True, 1e4), (False, 1e-9)], ids=["weak", "strong", "weak gradients"]
)
def test_the_first_that_sends_does_not_have_all_others_refused(refuses_weak: bool, first: float) -> None:
    likeness, rng = Likeness("what is sent", refuses_weak=refuses_weak), random.Random(6)
    for _ in range(LEAST_SEEN):
        assert likeness.why_not(LIAR, first, 0.0) is None
    refused = []
    for second in range(2 * int(FRESH_S)):
        likeness.why_not(LIAR, first, float(second))
        for peer in HONEST:
            if likeness.why_not(peer, rng.lognormvariate(0.0, 0.3), float(second)) is not None:
                refused.append(second)
            else:
                assert likeness.halvings(peer, 1.0, float(second)) == 0
    assert max(refused) < 2 * LEAST_SEEN


def test_one_that_sends_while_nobody_else_does_has_none_refused_for_long_that_come_back() -> None:
    likeness = seen(HONEST, random.Random(7))
    now = 2 * FRESH_S
    for _ in range(LEAST_SEEN):
        assert likeness.why_not(LIAR, 1e-9, now) is None
    for peer in HONEST:
        likeness.why_not(peer, 0.01, now)
    for peer in HONEST:
        assert likeness.why_not(peer, 0.01, now) is None


@pytest.mark.parametrize("strength", [1e-6, 1e4])
def test_what_most_claim_has_nobody_refused_and_does_not_become_usual(strength: float) -> None:
    likeness = seen(HONEST[:1], random.Random(8))
    newcomers = [PeerId(f"new {number}") for number in range(5)]
    for second in range(100):
        for peer in newcomers:
            likeness.why_not(peer, strength, float(second))
        assert likeness.why_not(HONEST[0], 0.01, float(second)) is None
        assert likeness.why_not(HONEST[1], 0.01, float(second)) is None
    for peer in newcomers:
        likeness.forget(peer)
    assert likeness.why_not(LIAR, 1e4, 100.0) is not None


def test_what_two_claim_of_four_is_not_taken() -> None:
    likeness = seen(HONEST[:2], random.Random(9))
    for second in range(20):
        for number in range(2):
            assert likeness.why_not(PeerId(f"new {number}"), 1.0, float(second)) is not None
        for peer in HONEST[:2]:
            assert likeness.why_not(peer, 0.01, float(second)) is None


def test_one_word_against_another_is_no_agreement() -> None:
    likeness = seen(HONEST[:1], random.Random(10))
    assert likeness.is_agreed(HONEST[0], 0.0)
    assert not likeness.is_agreed(LIAR, 0.0)
    assert seen(HONEST[:2], random.Random(10)).is_agreed(LIAR, 0.0)


def test_what_most_claim_is_worked_with_no_stronger_than_what_is_usual_where_others_stand_for_that() -> None:
    """Names are free: five of them claimed bodies a million times as strong, and those were worked with as they were."""
    likeness, taken = seen(HONEST[:4], random.Random(11)), []
    names = [PeerId(f"name {each}") for each in range(5)]
    for second in range(20):
        for name in names:
            strength = 1.0 if second < 8 else 1e6
            if likeness.why_not(name, strength, float(second)) is None:
                taken.append(strength / 2 ** likeness.halvings(name, strength, float(second)))
    assert max(taken) <= 4 * 2


def test_two_that_come_first_do_not_end_the_links_of_all_others() -> None:
    """What is refused of honest peers is no fault of theirs as long as those that say what is usual are not most of those that are heard."""
    likeness = Likeness("activations", refuses_weak=True)
    for name in ("first", "second"):
        for second in range(4):
            assert likeness.why_not(PeerId(name), 1e-3, float(second)) is None
    for second in range(4, 16):
        for peer in HONEST[:5]:
            if likeness.why_not(peer, 1.0, float(second)) is not None:
                assert second < 8
                assert second == 4 or not likeness.is_agreed(peer, float(second))
