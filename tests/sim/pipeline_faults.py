"""Planted faults of the pipeline: each is a mistake one could make in the scheduler. The simulator must catch every one."""

from dataclasses import replace
from typing import Any

from dilocox_peer.pipeline.contract import Backward, Work
from dilocox_peer.pipeline.hop import Grad
from dilocox_peer.pipeline.scheduler import Scheduler, _Call, _Flight, _State
from dilocox_peer.pipeline.slots import CallKey, Slots
from dilocox_peer.pipeline.versions import Versions
from dilocox_peer.types import PeerId


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

    def _start_backward(self, flight: _Flight) -> Work:
        work = super()._start_backward(flight)
        assert isinstance(work, Backward)
        return replace(work, version=self.versions.current)


class _CountsTwice(Scheduler):
    """Counts a micro-batch again when its gradient comes a second time."""

    def _on_grad(self, peer: PeerId, message: Grad, body: Any) -> None:
        before = self.duplicates
        super()._on_grad(peer, message, body)
        if self._is_head and self.duplicates > before:
            self.completed_total += 1


class _CachesById(Scheduler):
    """Keeps answers by id alone, so that another caller or a later output gets them, and takes what it did not ask for.
    One of the two alone does no harm: an answer from a callee that was not sent the output is dropped."""

    def _answer_key(self, key: CallKey, id_: Any) -> object:
        return id_

    def _is_answer(self, flight: _Flight | None, peer: PeerId, message: Grad) -> bool:
        return flight is not None and flight.id == message.id and flight.state is _State.CALLING


class _TakesAnyGradient(Scheduler):
    """Knows calls by micro-batch only: takes the gradient of an earlier output for that of the present one."""

    def _on_grad(self, peer: PeerId, message: Grad, body: Any) -> None:
        flight = self._busy.get(message.id)
        if flight is not None and flight.state is _State.CALLING and flight.call in self._calls:
            flight.asked.add(peer)
            message = Grad(message.id, message.loss, message.behind, flight.call)
        super()._on_grad(peer, message, body)


class _SendsUngranted(Scheduler):
    """Sends the body when the forward is done, granted or not."""

    def _forward_done(self, done: Any) -> None:
        flight = self._runs
        super()._forward_done(done)
        if flight is not None and flight.state is _State.CALLING and flight.phase.name == "RESERVED":
            self._send_step(flight)


class _ForgetsToFree(Scheduler):
    """Keeps the slot of what was cancelled."""

    def _free(self, key: CallKey) -> None:
        if key in self._inbound or self._now % 1.0 < 0.5:
            super()._free(key)


class _LosesCalls(Scheduler):
    """Forgets to send again what a callee had whose link went down."""

    def _move(self, flight: _Flight, reason: str) -> None:
        if reason != "unlinked":
            super()._move(flight, reason)
            return
        flight.phase, flight.callee, flight.due = _Call.GRANTED, None, float("inf")


class _DropsWithoutRelease(Scheduler):
    """Gives a micro-batch up and lets its activations lie."""

    def _give_up(self, flight: _Flight) -> None:
        super()._give_up(flight)
        self._out.pop()


def _with(name: str, *, slots: type[Slots] = Slots, versions: type[Versions] = Versions) -> type[Scheduler]:
    return type(name, (Scheduler,), {"slots_type": slots, "versions_type": versions})


FAULTS: dict[str, type[Scheduler]] = {
    "a slot freed twice": _with("FreesTwice", slots=_FreesTwice),
    "a third version": _with("StepsEarly", versions=_StepsEarly),
    "a backward with another version": _NewestVersion,
    "a late duplicate counted": _CountsTwice,
    "answers cached by id alone": _CachesById,
    "a gradient of an earlier output": _TakesAnyGradient,
    "a body without a grant": _SendsUngranted,
    "a slot never freed": _ForgetsToFree,
    "calls lost with the dead": _LosesCalls,
    "activations never released": _DropsWithoutRelease,
}
