"""Planted faults of the pipeline: each is a mistake one could make in the scheduler. The simulator must catch every one."""

from dataclasses import replace
from typing import Any

from dilocox_peer.pipeline.contract import Backward, GradRefused, HopReceived, StepRefused, Work
from dilocox_peer.pipeline.downstream import Downstream
from dilocox_peer.pipeline.flight import CallPhase, Flight, State
from dilocox_peer.pipeline.scheduler import Scheduler
from dilocox_peer.pipeline.slots import CallKey, Slots
from dilocox_peer.pipeline.upstream import Upstream
from dilocox_peer.pipeline.versions import Versions
from dilocox_peer.types import PeerId
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.hops import Grad


class _FreesTwice(Slots):
    """Gives a slot back twice: at the answer and again."""

    def release(self, key: CallKey) -> None:
        held = key in self._held
        super().release(key)
        if held and self._held:
            self._held.pop()


class _StepsEarly(Versions):
    """Makes a version while micro-batches of the one before the last are in flight."""

    @property
    def step_is_due(self) -> bool:
        return self.completed >= self.accumulate

    def made(self) -> None:
        self.current += 1
        self._old, self._young = self._old + self._young, 0

    def release(self, version: int) -> None:
        if version == self.current and self._young:
            self._young -= 1
        else:
            self._old -= 1


class _NewestVersion(Scheduler):
    """Runs a backward with the newest version instead of its forward's."""

    def _start_backward(self, flight: Flight) -> Work:
        work = super()._start_backward(flight)
        assert isinstance(work, Backward)
        return replace(work, version=self.versions.current)


class _CountsTwice(Scheduler):
    """Counts a micro-batch again when its gradient comes a second time."""

    def _received(self, received: HopReceived) -> None:
        before = self.duplicates
        super()._received(received)
        if self._is_origin and self.duplicates > before:
            self.completed_total += 1


class _CachesById(Upstream):
    """Keeps answers by id alone, so that another caller or a later output gets them. Does no harm alone: an answer from a
    callee that was not sent the output is dropped."""

    def _answer_key(self, key: CallKey, id_: Any) -> object:
        return id_


class _TakesUnasked(Downstream):
    """Takes answers that it did not ask for. The other half of _CachesById."""

    def _is_answer(self, flight: Flight | None, peer: PeerId, message: Grad) -> bool:
        return flight is not None and flight.id == message.id and flight.state is State.CALLING


class _TakesAnyGradient(Downstream):
    """Knows calls by micro-batch only: takes the gradient of an earlier output for that of the present one."""

    def on_grad(self, peer: PeerId, message: Grad, body: Any) -> None:
        for flight in self._calls.values():
            if flight.id == message.id and flight.state is State.CALLING:
                flight.asked.add(peer)
                message = replaced(message, call=flight.call)
                break
        super().on_grad(peer, message, body)


class _SendsUngranted(Scheduler):
    """Sends the body when the forward is done, granted or not."""

    def _forward_done(self, done: Any) -> None:
        flight = self._runs
        super()._forward_done(done)
        if flight is not None and flight.state is State.CALLING and flight.phase is CallPhase.RESERVED:
            self._calls.send_step(flight)


class _ForgetsToFree(Upstream):
    """Keeps the slot of what was cancelled."""

    def _free(self, key: CallKey) -> None:
        if key in self.flights or self._desk.now % 1.0 < 0.5:
            super()._free(key)


class _LosesCalls(Downstream):
    """Forgets to send again what a callee had whose link went down."""

    def _move(self, flight: Flight, reason: str) -> None:
        if reason != "unlinked":
            super()._move(flight, reason)
            return
        flight.phase, flight.callee, flight.due = CallPhase.GRANTED, None, float("inf")


class _ForgetsTheRefused(Upstream):
    """Tells a caller that its body is not taken, and keeps the slot."""

    _is_refusing = False

    def refuse(self, refused: StepRefused) -> None:
        self._is_refusing = True
        super().refuse(refused)
        self._is_refusing = False

    def _free(self, key: CallKey) -> None:
        if not self._is_refusing:
            super()._free(key)


class _LosesWhatItRefuses(Downstream):
    """Takes no answer of a callee for what it has, and has nobody else do it."""

    def refuse(self, refused: GradRefused) -> None:
        flight = self._calls.get(refused.message.call)
        if flight is not None and flight.callee == refused.peer:
            flight.phase, flight.due = CallPhase.GRANTED, float("inf")
            flight.asked.discard(refused.peer)


class _DropsWithoutRelease(Scheduler):
    """Gives a micro-batch up and lets its activations lie."""

    def _give_up(self, flight: Flight) -> None:
        super()._give_up(flight)
        self._desk.actions.pop()


def _with(**parts: type[Slots] | type[Versions] | type[Upstream] | type[Downstream]) -> type[Scheduler]:
    """A scheduler of these parts, by the name of its attribute."""
    return type("Planted", (Scheduler,), parts)


FAULTS: dict[str, type[Scheduler]] = {
    "a slot freed twice": _with(slots_type=_FreesTwice),
    "a third version": _with(versions_type=_StepsEarly),
    "a backward with another version": _NewestVersion,
    "a late duplicate counted": _CountsTwice,
    "answers cached by id alone": _with(callers_type=_CachesById, calls_type=_TakesUnasked),
    "a gradient of an earlier output": _with(calls_type=_TakesAnyGradient),
    "a body without a grant": _SendsUngranted,
    "a slot never freed": _with(callers_type=_ForgetsToFree),
    "calls lost with the dead": _with(calls_type=_LosesCalls),
    "the slot of a refused body kept": _with(callers_type=_ForgetsTheRefused),
    "calls lost whose answer was refused": _with(calls_type=_LosesWhatItRefuses),
    "activations never released": _DropsWithoutRelease,
}
