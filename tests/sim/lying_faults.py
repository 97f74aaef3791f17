"""Planted faults of the checks: each is a mistake one could make. The simulator must catch every one."""

from collections.abc import Collection, Mapping

from dilocox_peer.events import Event
from dilocox_peer.pipeline.checks import Checks
from dilocox_peer.pipeline.contract import GradientsFalse
from dilocox_peer.pipeline.downstream import Downstream
from dilocox_peer.pipeline.routes import Callee
from dilocox_peer.pipeline.scheduler import Scheduler
from dilocox_peer.types import PeerId


class _ChecksNothing(Checks):
    """Sends nothing to a second callee."""

    def second(
        self, first: PeerId, callees: Mapping[PeerId, Callee], now: float, *, had: Collection[PeerId] = ()
    ) -> PeerId | None:
        return None


class _BlamesTheSecond(Checks):
    """Of two that disagree the one that was asked as the second lies."""

    def compared(
        self, one: PeerId, other: PeerId, agreement: float, callees: Collection[PeerId], now: float
    ) -> list[Event]:
        return [] if agreement > 0.5 else [GradientsFalse(other, (one,), agreement, 1.0)]


class _HasNoPatience(Checks):
    """Names who is deceived by the stages behind it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._patience = 0


class _NamesAndGoesOn(Downstream):
    """Says who lies, and sends it more."""

    def _expel(self, peer: PeerId) -> None:
        pass


def _with(checks: type[Checks]) -> type[Scheduler]:
    return type("Planted", (Scheduler,), {"calls_type": type("Calls", (Downstream,), {"checks_type": checks})})


FAULTS: dict[str, type[Scheduler]] = {
    "nothing is checked": _with(_ChecksNothing),
    "the second is blamed": _with(_BlamesTheSecond),
    "no patience with who is deceived": _with(_HasNoPatience),
    "named and not left out": type("Planted", (Scheduler,), {"calls_type": _NamesAndGoesOn}),
}
