"""Planted faults of averaging in slices: each is a mistake one could make in it. The simulator must catch every one of them."""

from collections.abc import Sequence
from dataclasses import replace

from dilocox_peer.peer.rounds.averages import Slicing
from dilocox_peer.peer.rounds.ballots import Ballots
from dilocox_peer.peer.rounds.contract import Action, AverageSlice, BlobPart, ForgetBlobs, Input, SliceAveraged
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.sitting import Sitting
from dilocox_peer.types import PeerId
from dilocox_peer.wire.chain import Entry, Result, Value, inputs_of
from tests.sim.faults import AcksEarly


class NoDeputy(Slicing):
    """Nobody but the first in order averages a slice, whatever becomes of it."""

    def drawn_to(self, index: int, now: float) -> list[PeerId]:
        return super().drawn_to(index, now)[:1]


class NobodyStepsIn(Slicing):
    """The owner and the deputy, or nobody: also when they are gone."""

    def drawn_to(self, index: int, now: float) -> list[PeerId]:
        return list(self._orders[index][:2])


class BelievesTheFirst(Slicing):
    """Of a slice the word of the first in order counts alone."""

    def results(self, entries: Sequence[Entry]) -> tuple[Result, ...] | None:
        batch = self._batches.get(inputs_of(entries))
        if batch is None or any(len(batch.said.get(index, {})) < 2 for index in range(self._sharing.count)):
            return None
        found = []
        for index in range(self._sharing.count):
            by = sorted(batch.said[index], key=self._orders[index].index)[:2]
            found.append(Result(*batch.said[index][by[0]][0], tuple((peer, batch.said[index][peer][1]) for peer in by)))
        return tuple(found) if self._holdings.has_all(each.blob for each in found) else None

    def _want_results(self, batch, now):
        wanted = super()._want_results(batch, now)
        for index, said in batch.said.items():
            for outcome, _ in said.values():
                wanted += self._want(outcome.blob, BlobPart("result", index), self._seat.others, now)
        return wanted

    def why_not_vouched(self, value: Value) -> str | None:
        return None


class OneSliceForAll(Slicing):
    """The result of the first slice stands for all."""

    def results(self, entries: Sequence[Entry]) -> tuple[Result, ...] | None:
        results = super().results(entries)
        return None if results is None else tuple(replaced_base(results[0], each.base) for each in results)

    def why_not_vouched(self, value: Value) -> str | None:
        return None


class AveragesWhatIsNotHere(Slicing):
    """Does not wait for slices before it averages them."""

    def _average(self, inputs, batch, own, now):
        actions: list[Action] = []
        for index in own:
            if index not in batch.under_way and self._seat.me not in batch.said.get(index, {}):
                batch.under_way.add(index)
                actions.append(AverageSlice(inputs, index, batch.entries, b"", "int4", 8))
        return actions


def replaced_base(result: Result, base: bytes) -> Result:
    return Result(result.blob, result.size_bytes, base, result.residual, result.by)


class ForgetsWhatWasLost(RoundMachine):
    """Vouches for a result and keeps no residual."""

    def handle(self, event: Input, now: float, *, more: bool = False) -> list[Action]:
        actions = super().handle(event, now, more=more)
        if isinstance(event, SliceAveraged) and event.outcome is not None:
            return [ForgetBlobs((event.outcome.residual,)), *actions]
        return actions


class AveragesWithoutResidual(RoundMachine):
    """Goes on from nothing in every round."""

    def handle(self, event: Input, now: float, *, more: bool = False) -> list[Action]:
        actions = super().handle(event, now, more=more)
        return [replace(each, base=b"") if isinstance(each, AverageSlice) else each for each in actions]


def _with(name: str, slicing: type[Slicing] = Slicing, ballots: type[Ballots] = Ballots) -> type[RoundMachine]:
    faulty = type("Faulty", (Sitting,), {"slicing_type": slicing, "ballots_type": ballots})
    return type(name, (RoundMachine,), {"sitting_type": faulty})


FAULTS: dict[str, type[RoundMachine]] = {
    "no deputy": _with("NoDeputy", NoDeputy),
    "nobody steps in for who is gone": _with("NobodyStepsIn", NobodyStepsIn),
    "of two that differ the first is believed": _with("BelievesTheFirst", BelievesTheFirst),
    "one slice for all": _with("OneSliceForAll", OneSliceForAll),
    "ACK before the results are held": _with("AcksEarly", ballots=AcksEarly),
    "averages slices that are not here": _with("AveragesWhatIsNotHere", AveragesWhatIsNotHere),
    "vouches without keeping the residual": ForgetsWhatWasLost,
    "every round without the residual": AveragesWithoutResidual,
}
