"""What stands in a published model in place of its layers and of what is below its head (published.py)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dilocox_peer.model.borders import as_addend
from dilocox_peer.model.families import library


class Checkpointed:
    """A layer's forward that keeps its inputs alone."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*arguments, **named)
        return checkpoint(self._forward, *arguments, use_reentrant=False, preserve_rng_state=False, **named)


class CheckpointedFirst:
    """The first layer's, that does not keep its input either: for a backward what is before it is computed once more."""

    def __init__(self, forward: Callable[..., Any], again: Callable[[], Callable[[], Tensor]]) -> None:
        """again: of the forward that is under way, what gives the input once more, without its graph."""
        self._forward = forward
        self._again = again

    def __call__(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(hidden_states, *arguments, **named)
        again, has_gradient, given = self._again(), hidden_states.requires_grad, [hidden_states]

        def run(*arguments: Any, **named: Any) -> Any:
            hidden_BTD = given.pop() if given else again().requires_grad_(has_gradient)
            return self._forward(hidden_BTD, *arguments, **named)

        return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False, **named)


class OnceAdded:
    """The library's masks, as what attention adds (borders.as_addend), once for all layers of a forward."""

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, Tensor]] = []

    def forget(self) -> None:
        """A forward is over."""
        self._made.clear()

    def before(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's forward that is given them."""

        def given(*arguments: Any, **named: Any) -> Any:
            mask = named.get("attention_mask")
            if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() == 4:
                named["attention_mask"] = self._added(mask)
            return forward(*arguments, **named)

        return given

    def _added(self, mask: Tensor) -> Tensor:
        for known, made in self._made:
            if known is mask:
                return made
        self._made.append((mask, as_addend(mask)))
        return self._made[-1][1]


class Captured(Exception):
    """Carries what comes out of a stage's last layer out of the model's forward."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class PassOn(nn.Module):
    """In place of a layer of another stage."""

    def forward(self, hidden_states: Tensor, *_rest: Any, **_named: Any) -> Tensor:
        return hidden_states


class Inject(nn.Module):
    """Just before the stage's first layer: gives what came from the stage before."""

    hidden: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_rest: Any, **_named: Any) -> Tensor:
        assert self.hidden is not None, "nothing came from the stage before"
        return self.hidden


class Capture(nn.Module):
    """Just behind the stage's last layer: the rest of the model is not run."""

    def forward(self, hidden_states: Tensor, *_rest: Any, **_named: Any) -> Tensor:
        raise Captured(hidden_states)


class AsTuple(nn.Module):
    """For families whose layers give a tuple."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *arguments: Any, **named: Any) -> tuple[Tensor]:
        return (self.inner(*arguments, **named),)


class Headless(nn.Module):
    """The model below its head; `giving` some hidden states the head runs on those instead."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self._output_class: Any = None
        self._given: Tensor | None = None

    def giving(self, hidden_BTD: Tensor) -> "Giving":
        return Giving(self, hidden_BTD)

    def give(self, hidden_BTD: Tensor | None) -> None:
        self._given = hidden_BTD

    def forward(self, *arguments: Any, **named: Any) -> Any:
        if self._given is not None:
            return (self._output_class or library().modeling_outputs.BaseModelOutputWithPast)(
                last_hidden_state=self._given
            )
        output = self.base(*arguments, **named)
        self._output_class = type(output)
        return output


class Giving:
    def __init__(self, base: Headless, hidden_BTD: Tensor) -> None:
        self._base, self._hidden_BTD = base, hidden_BTD

    def __enter__(self) -> None:
        self._base.give(self._hidden_BTD)

    def __exit__(self, *_error: object) -> None:
        self._base.give(None)
