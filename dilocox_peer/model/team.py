"""A whole model on one device or several of the same machine: each computes micro-batches of its own, the first one steps.

The gradient of a step is the sum over the devices in their order, so a step is that of one device with as many micro-batches. What the
others cost: their weights and a gradient each, which cross once a step each way; optimizer and outer loop know the first alone.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from dilocox_peer.model.architecture import StageModel
from dilocox_peer.model.stage import Stage


class Team:
    """One thread calls. model: the first device's, whose parameters and gradient are the peer's."""

    def __init__(self, models: Sequence[StageModel]) -> None:
        first, *others = models
        self.model = first
        self._first = Stage(first)
        self._others = [Stage(model) for model in others]
        self._are_equal = True
        self._added = False
        # Its threads end with the process, or when nobody holds the team any more: each has a device, and waits for it.
        self._threads = ThreadPoolExecutor(len(others), thread_name_prefix="dilocox-device") if others else None

    def __len__(self) -> int:
        """Micro-batches that are computed at a time."""
        return 1 + len(self._others)

    def train(self, batches: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
        """Mean losses in nats a token of as many micro-batches as there are devices, or fewer. Raises FloatingPointError for one that
        is not finite, when all are done."""
        assert 0 < len(batches) <= len(self), f"{len(batches)} micro-batches on {len(self)} devices"
        if not self._are_equal:
            for other in self._others:
                other.model.flat_N.copy_(self.model.flat_N)
            self._are_equal = True
        if self._threads is None:
            return [self._first.train_micro_batch(*batches[0])]
        others = zip(self._others, batches[1:], strict=False)
        running = [self._threads.submit(stage.train_micro_batch, *batch) for stage, batch in others]
        self._added = self._added or bool(running)
        try:
            loss = self._first.train_micro_batch(*batches[0])
        finally:
            failures = [future.exception() for future in running]  # nobody computes on while the caller goes on
        for failure in failures:
            if failure is not None:
                raise failure
        return [loss, *(future.result() for future in running)]

    @torch.no_grad()
    def gather(self) -> None:
        """Adds the others' gradients to the first one's, whose turn it is to step."""
        if not self._added:
            return
        for other in self._others:
            self.model.flat_grad_N.add_(other.model.flat_grad_N.to(self.model.flat_grad_N.device))
            other.model.zero_grad()
        self._added = False

    def changed(self) -> None:
        """The first one's parameters are others now."""
        self._are_equal = not self._others

    def zero_grad(self) -> None:
        for stage in (self._first, *self._others):
            stage.model.zero_grad()
        self._added = False
