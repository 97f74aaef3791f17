"""The training loop of a whole model: when it steps."""

import re
import sys
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from dilocox_peer.data.corpus import Corpus
from dilocox_peer.data.sources import Document
from dilocox_peer.errors import ConfigError
from dilocox_peer.manifest import InnerSection, Manifest, ModelSection, RoundsSection
from dilocox_peer.model.architecture import build_model, layout_of
from dilocox_peer.model.team import Team
from dilocox_peer.peer.device import chosen_cards, chosen_devices
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.settings import cards, check_device
from dilocox_peer.peer.training import given_back
from dilocox_peer.peer.training.left_out import MOST_IN_A_ROW
from dilocox_peer.peer.training.outer import first_state, initial_state
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


def loop_of(
    manifest: Manifest, *, devices: tuple[str, ...] = ("cpu",), limit: int | None = None, precision: str = "float32"
) -> WholeLoop:
    ticks = count()
    loop = WholeLoop(
        manifest, peer=PeerId("p"), incarnation=1, corpus=Corpus([Document("text", TEXT)], name="text", validation=0.1),
        devices=devices, clock=lambda: float(next(ticks)), micro_batch_limit=limit, timetable=Timetable(manifest),
        precision=precision,
    )  # fmt: skip
    loop.begin(initial_state(manifest))
    return loop


def weights(loop: WholeLoop) -> list[float]:
    flat_N = loop.close().flat_N
    loop.withdraw()
    return flat_N.tolist()


@pytest.mark.skipif(sys.platform != "linux", reason="madvise as Linux has it")
def test_what_was_added_or_copied_goes_back_to_the_system(monkeypatch):
    """In one call, when it is let go of, it would hold the event loop for as long as the system takes for a vector of the stage."""
    monkeypatch.setattr(given_back, "LEAST_BYTES", 1)
    loop = loop_of(manifest_with())
    before = torch.tensor(weights(loop))
    shift = torch.full_like(before, 0.25)
    local = torch.full_like(before, 0.5)
    loop.shift(shift, certified=1)
    assert weights(loop) == (before + 0.25).tolist()
    loop.replace(local, certified=2)
    assert weights(loop) == [0.5] * len(local)
    assert not shift[1024:-1024].any()
    assert not local[1024:-1024].any()


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


def beyond_float16(manifest: Manifest, *, tokens: slice) -> torch.Tensor:
    """Parameters with which a forward comes to some hundred thousand at these tokens, and to usual values at the others."""
    flat_N = initial_state(manifest).anchor_N().clone()
    views = {spec.name: flat_N[start:stop].view(spec.shape) for spec, start, stop in layout_of(manifest).spans()}
    embedding = views["model.embed_tokens.weight"]
    embedding[:, 0] = 0.0
    embedding[tokens] = 0.0
    embedding[tokens, 0] = 50.0
    for name in ("gate", "up"):
        views[f"model.layers.0.mlp.{name}_proj.weight"][0, 0] = 120.0
    return flat_N


def begun_with(flat_N: torch.Tensor, manifest: Manifest, **more: Any) -> WholeLoop:
    loop = loop_of(manifest, **more)
    loop.begin(first_state(layout_of(manifest), flat_N, head=manifest.genesis(0)))
    return loop


@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cpu")])
def test_a_micro_batch_that_float16_cannot_hold_is_left_out(devices: tuple[str, ...]):
    """With what was added up for its step: 6 % of these have the odd byte."""
    manifest = manifest_with(accumulate=2)
    flat_N = beyond_float16(manifest, tokens=slice(255, 256))
    loop, left_out = begun_with(flat_N, manifest, devices=devices, precision="float16"), 0
    for _ in range(80):
        before = loop.progress.micro_batches
        assert loop.train_on()
        if loop.progress.micro_batches == before:
            left_out += 1
            assert not loop.vectors()[1].any()
    assert 2 <= left_out <= 40
    assert loop.progress.train_loss == pytest.approx(np.log(256), abs=0.3)
    after_N = loop.vectors()[0]
    assert bool(after_N.isfinite().all())
    assert not torch.equal(after_N, flat_N)


def test_who_can_hold_nothing_in_float16_is_told_what_to_use():
    manifest = manifest_with()
    loop = begun_with(beyond_float16(manifest, tokens=slice(0, 256)), manifest, precision="float16")
    for _ in range(MOST_IN_A_ROW - 1):
        assert loop.train_on()
    with pytest.raises(FloatingPointError, match=r"16 times in a row in --precision float16.*use --precision bfloat16"):
        loop.train_on()
    assert loop.progress.micro_batches == 0
    other = begun_with(beyond_float16(manifest, tokens=slice(0, 256)), manifest, precision="bfloat16")
    assert other.train_on()


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_model_that_has_diverged_ends_at_once(precision: str):
    loop = loop_of(manifest_with(), precision=precision)
    loop.replace(torch.full((len(weights(loop)),), torch.nan), certified=1)
    with pytest.raises(FloatingPointError, match=r"^the training loss is nan$"):
        loop.train_on()


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
