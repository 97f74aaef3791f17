"""The training loop of a whole model: when it steps."""

from itertools import count

import numpy as np
import torch

from dilocox_peer.data.corpus import Corpus
from dilocox_peer.data.sources import Document
from dilocox_peer.manifest import InnerSection, Manifest, ModelSection, RoundsSection
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.training.outer import initial_state
from dilocox_peer.peer.training.whole_loop import WholeLoop
from dilocox_peer.types import PeerId

TEXT = np.frombuffer(np.random.default_rng(0).bytes(20_000), dtype=np.uint8)


def test_the_batch_of_a_step_grows_over_the_rounds():
    manifest = Manifest(
        model=ModelSection(layers=1, hidden_size=8, heads=2, kv_heads=1, mlp_size=8, context=8),
        inner=InnerSection(micro_batch=2, accumulate=3, first_accumulate=1, batch_ramp=1.0, warmup=0.0, floor=0.5),
        rounds=RoundsSection(total=4, inner_steps=2),
    )
    ticks = count()
    loop = WholeLoop(
        manifest, peer=PeerId("p"), incarnation=1, corpus=Corpus([Document("text", TEXT)], name="text", validation=0.1),
        device="cpu", clock=lambda: float(next(ticks)), micro_batch_limit=None, timetable=Timetable(manifest),
    )  # fmt: skip
    loop.begin(initial_state(manifest).anchor_N(), 0)

    def weights() -> list[float]:
        flat_N = loop.close().flat_N
        loop.withdraw()
        return flat_N.tolist()

    flat = weights()
    steps: list[list[int]] = []
    for certified in range(4):
        if certified:
            loop.close()
            loop.shift(torch.zeros(len(flat)), certified=certified)
        steps.append([])
        since = 0
        for _ in range(loop.progress.share):
            loop.train_on()
            since, before, flat = since + 1, flat, weights()
            if flat != before:
                steps[-1].append(since)
                since = 0
    assert steps == [[1, 1], [1, 1], [2, 2], [2, 2]]
