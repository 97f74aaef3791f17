"""Small runs cut into stages, and the same steps by one whole model: what the pipeline's equivalences compare."""

from typing import Any

import numpy as np
import torch

from dilocox_peer.config import preset
from dilocox_peer.data.corpus import Corpus
from dilocox_peer.data.sources import Document
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.model.inner import InnerOptimizer, schedule
from dilocox_peer.model.stage import build_stage
from dilocox_peer.types import PeerId


def corpus() -> Corpus:
    rng = np.random.default_rng(0)
    text = rng.integers(97, 105, 20_000, dtype=np.uint8)
    return Corpus([Document("a.txt", text)], name="letters", validation=0.1)


def manifest_of(stages: int, *, schedule: str = "flush", optimizer: str = "adamw", clip_norm: float = 1.0):
    return preset(
        "tiny",
        model={"layers": max(3, stages), "hidden_size": 32, "mlp_size": 48, "context": 16},
        stages={"count": stages, "schedule": schedule, "activations": "fp32"},
        inner={
            "optimizer": optimizer,
            "learning_rate": 3e-3,
            "micro_batch": 2,
            "accumulate": 4,
            "clip_norm": clip_norm,
        },
        rounds={"total": 8, "inner_steps": 8},
        compression={"codec": "none"},
    )


def one_model(
    manifest: Any, *, micro_batches: int, cut_like: Any, origin: PeerId = PeerId("peer0"), incarnation: int = 1
) -> dict[str, torch.Tensor]:
    """The same steps by one whole model, its gradient clipped stage by stage, as the stages of `cut_like` do alone."""
    stage = build_stage(manifest)
    model, inner, data = stage.model, manifest.inner, corpus()
    optimizer = InnerOptimizer(model, inner.model_copy(update={"clip_norm": 1e9}))
    spans = {spec.name: slice(start, stop) for spec, start, stop in model.layout.spans()}
    parts = [[spans[spec.name] for spec in layout_of(cut_like, each).tensors] for each in range(cut_like.stages.count)]
    share_of = 8 * inner.accumulate
    for index in range(micro_batches):
        x, y = data.train_batch(
            seed=0,
            peer=origin,
            incarnation=incarnation,
            round_number=1,
            index=index,
            batch=inner.micro_batch,
            context=16,
        )
        stage.train_micro_batch(x, y)
        if (index + 1) % inner.accumulate:
            continue
        for part in parts:
            norm = torch.cat([model.flat_grad_N[each] for each in part]).norm() / inner.accumulate
            for each in part:
                model.flat_grad_N[each].mul_(min(1.0, inner.clip_norm / float(norm)))
        position = min((index + 1) / share_of, 1.0) / 8
        optimizer.step(micro_batches=inner.accumulate, share=schedule(position, warmup=inner.warmup))
    return {name: model.flat_N[part] for name, part in spans.items()}
