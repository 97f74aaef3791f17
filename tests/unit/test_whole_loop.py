"""The training loop of a whole model: when it steps."""

import re
from itertools import count

import numpy as np
import pytest
import torch

from dilocox_peer.data.corpus import Corpus
from dilocox_peer.data.sources import Document
from dilocox_peer.errors import ConfigError
from dilocox_peer.manifest import InnerSection, Manifest, ModelSection, RoundsSection
from dilocox_peer.model.architecture import build_model
from dilocox_peer.model.team import Team
from dilocox_peer.peer.device import chosen_cards, chosen_devices
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.settings import cards, check_device
from dilocox_peer.peer.training.outer import initial_state
from dilocox_peer.peer.training.whole_loop import WholeLoop
from dilocox_peer.types import PeerId

TEXT = np.frombuffer(np.random.default_rng(0).bytes(20_000), dtype=np.uint8)


def manifest_with(*, accumulate: int = 1, first_accumulate: int = 0) -> Manifest:
    return Manifest(
        model=ModelSection(layers=1, hidden_size=8, heads=2, kv_heads=1, mlp_size=8, context=8),
        inner=InnerSection(
            micro_batch=2,
            warmup=0.0,
            floor=0.5,
            accumulate=accumulate,
            first_accumulate=first_accumulate,
            batch_ramp=1.0,
        ),
        rounds=RoundsSection(total=4, inner_steps=2),
    )


def loop_of(manifest: Manifest, *, devices: tuple[str, ...] = ("cpu",), limit: int | None = None) -> WholeLoop:
    ticks = count()
    loop = WholeLoop(
        manifest, peer=PeerId("p"), incarnation=1, corpus=Corpus([Document("text", TEXT)], name="text", validation=0.1),
        devices=devices, clock=lambda: float(next(ticks)), micro_batch_limit=limit, timetable=Timetable(manifest),
    )  # fmt: skip
    loop.begin(initial_state(manifest))
    return loop


def weights(loop: WholeLoop) -> list[float]:
    flat_N = loop.close().flat_N
    loop.withdraw()
    return flat_N.tolist()


def test_the_batch_of_a_step_grows_over_the_rounds():
    loop = loop_of(manifest_with(accumulate=3, first_accumulate=1))
    flat = weights(loop)
    steps: list[list[int]] = []
    for certified in range(4):
        if certified:
            loop.close()
            loop.shift(torch.zeros(len(flat)), certified=certified)
        steps.append([])
        since = 0
        for _ in range(loop.progress.share):
            loop.train_on()
            since, before, flat = since + 1, flat, weights(loop)
            if flat != before:
                steps[-1].append(since)
                since = 0
    assert steps == [[1, 1], [1, 1], [2, 2], [2, 2]]


@pytest.mark.parametrize("accumulate", [1, 2, 5])
def test_several_devices_train_as_one_with_the_same_micro_batches(accumulate: int):
    """Round by round, with a shift and other weights from outside between steps; a bound on the round's work is kept."""
    manifest = manifest_with(accumulate=accumulate)
    one, three = (
        loop_of(manifest, devices=devices, limit=2 * accumulate + 1) for devices in (("cpu",), ("cpu", "cpu", "cpu"))
    )
    shift_N = torch.full((len(weights(one)),), 1e-3)
    for certified in range(1, 4):
        for loop in (one, three):
            calls = 0
            while loop.train_on():
                calls += 1
            assert loop.progress.micro_batches == 2 * accumulate + 1
            assert loop is one or calls == {1: 3, 2: 3, 5: 5}[accumulate]
            loop.close()
            if certified == 2:
                loop.replace(torch.full_like(shift_N, 0.02), certified=certified)
            else:
                loop.shift(shift_N, certified=certified)
        assert weights(three) == pytest.approx(weights(one), abs=1e-6)
        assert three.progress.tokens == one.progress.tokens


def test_what_one_device_cannot_compute_is_raised_when_all_are_done():
    manifest = manifest_with()
    first, second = (build_model(manifest.model) for _ in range(2))
    team = Team([first, second])
    first.flat_N.fill_(0.01)
    team.changed()
    batch = (torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long))
    assert len(team.train([batch, batch])) == 2
    second.flat_N.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="the training loss is nan"):
        team.train([batch, batch])


def test_gpus_are_devices_by_number():
    assert cards("0") == "cuda:0"
    assert cards("0, 1,02") == "cuda:0,cuda:1,cuda:2"
    for wrong in ("", "0,", "a", "0;1", "-1", "0,1234", "\u0661"):
        with pytest.raises(ConfigError, match="numbers of cards with commas between"):
            cards(wrong)


def test_a_device_that_no_machine_has_is_told_without_the_librarys_list():
    for name in ("auto", "cpu", "mps", "xpu", "cuda", "cuda:7", "cuda:0,cuda:1", "cuda:0, cpu", "xpu:1"):
        check_device(name)
    for name in ("", "gpu", "cuda:", "cuda:x", "cuda:0;cuda:1", "cuda:0,", "CPU", "meta", "cuda:1234"):
        with pytest.raises(ConfigError, match=f"^--device {re.escape(name)} is no device: use auto, cpu"):
            check_device(name)
    with pytest.raises(ConfigError, match=r"^--device meta is no device"):
        chosen_devices("meta")


def test_a_card_that_is_named_twice_or_is_not_here_is_told_in_the_flags_words():
    with pytest.raises(ConfigError, match=r"^--gpus 0,0: cuda:0,cuda:0 names cuda:0 twice"):
        chosen_cards("0,0")
    with pytest.raises(ConfigError, match=r"^--gpus 998, 999: cuda:998 cannot be used here \("):
        chosen_cards("998, 999")


def test_a_device_is_named_once():
    assert chosen_devices("cpu, cpu") == ("cpu", "cpu")
    with pytest.raises(ConfigError, match="names cuda:0 twice: name each device once"):
        chosen_devices("cuda:0,cuda:0")
    with pytest.raises(ConfigError, match="--device cuda:7 cannot be used here"):
        chosen_devices("cpu,cuda:7")
