"""What members say that slices came to, at one head: whose words count, what is a result, what is not voted for. Pure."""

from collections.abc import Sequence

from dilocox_peer.peer.rounds.contract import BlobPart
from dilocox_peer.peer.rounds.holdings import Holdings
from dilocox_peer.peer.rounds.named import Named, SliceWords, are_as_many, result_of, why_not_signed
from dilocox_peer.peer.rounds.seat import Seat
from dilocox_peer.peer.rounds.slices import supporters
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import VOUCHING, Entry, Result, SliceOutcome, Value, average_statement, inputs_of
from dilocox_peer.wire.rounds import Average


class Words:
    """The words of one (head, view) at one peer. batches: what was named here, by its name. orders: of each slice those that may average, as they are drawn."""

    def __init__(self, seat: Seat, holdings: Holdings, orders: Sequence[Sequence[PeerId]]) -> None:
        self._seat = seat
        self._holdings = holdings
        self._orders = orders
        self.batches: dict[Digest, Named] = {}

    def statement(self, inputs: Digest, index: int, outcome: SliceOutcome) -> bytes:
        """What is signed here of a slice."""
        return average_statement(self._seat.place.stage, self._seat.place.head, inputs, index, outcome)

    def ours(self, batch: Named) -> tuple[Average, ...]:
        """What we came to, as the others are told it."""
        me = self._seat.me
        mine = ((index, by[me]) for index, by in sorted(batch.said.items()) if me in by)
        return tuple(Average(index, *outcome, signature) for index, (outcome, signature) in mine)

    def look(self, batch: Named, index: int, now: float, within_s: float) -> None:
        """Notes who said what was asked for in vain so often, or takes so long, that others are to average the slice. One that says the same
        later may have it."""
        said = batch.said.get(index, {})
        outcomes = {outcome for outcome, _ in said.values()}
        if self._seat.me not in said and any(
            self._holdings.has(each.blob, BlobPart("result", index)) for each in outcomes
        ):
            batch.came(index, now)
        is_late, is_over = batch.is_late(index, now, within_s), now >= batch.known.get(index, now) + within_s
        for outcome in outcomes:
            failures, before = self._holdings.failures(outcome.blob), batch.tried.get(outcome.blob, 0)
            sayers = {peer for peer, word in said.items() if word[0] == outcome}
            is_in_vain = failures >= before + self._seat.timing.blob_tries
            if is_in_vain or (is_late and not before):
                batch.tried[outcome.blob] = max(failures, 1)
                batch.misers.update((peer, index) for peer in sayers)
            if is_in_vain or (is_over and failures):
                batch.failing |= sayers

    def lost(self, batch: Named, index: int) -> set[PeerId]:
        """Those whose words of a slice do not count, as what they say is no mean, or nowhere to be had."""
        holdings = self._holdings

        def is_lost(peer: PeerId, blob: Digest) -> bool:
            return holdings.is_refused(blob, BlobPart("result", index)) or (
                (peer, index) in batch.misers and not holdings.has(blob, BlobPart("result", index))
            )

        return {peer for peer, (outcome, _) in batch.said.get(index, {}).items() if is_lost(peer, outcome.blob)}

    def counted(self, batch: Named, index: int) -> SliceWords:
        """The words of a slice that count: of those to whom slices are left, where two of them have spoken."""
        said = batch.said.get(index, {})
        trusted = {peer: word for peer, word in said.items() if self._seat.owner.conduct.averages(peer)}
        words, lost = said if len(trusted) < VOUCHING else trusted, self.lost(batch, index)
        return {peer: word for peer, word in words.items() if peer not in lost}

    def num_disputed(self, batch: Named, index: int) -> int:
        """Words of a slice that others are to make up for: that contradict another, or do not count."""
        outcomes = {outcome for outcome, _ in self.counted(batch, index).values()}
        return max(0, len(outcomes) - 1) + len(self.lost(batch, index))

    def result(self, batch: Named, index: int) -> Result | None:
        """What two say, of those that count, and not as many another thing."""
        return result_of(self.counted(batch, index), self._orders[index])

    def results(self, entries: Sequence[Entry]) -> tuple[Result, ...] | None:
        """What these contributions came to, if all of it is known and here."""
        if (batch := self.batches.get(inputs_of(entries))) is None:
            return None
        found = (self.result(batch, index) for index in range(len(self._orders)))
        results = tuple(result for result in found if result is not None)
        if len(results) < len(self._orders) or not all(
            self._holdings.has(result.blob, BlobPart("result", index)) for index, result in enumerate(results)
        ):
            return None
        return results

    def about(self, value: Value) -> list[SliceWords]:
        """What is said of each slice of the inputs that value has."""
        batch = self.batches.get(inputs_of(value.entries))
        return [{} if batch is None else batch.said.get(index, {}) for index in range(len(value.results))]

    def why_not_vouched(self, value: Value) -> str | None:
        """Why we do not vote for these results: a signature that is none, or we heard as many say otherwise."""
        if not value.results:
            return None
        said, batch = self.about(value), self.batches.get(inputs_of(value.entries))
        if reason := why_not_signed(value, self._seat.place, self._seat.owner.verify, said):
            return reason
        for index, (result, words) in enumerate(zip(value.results, said, strict=True)):
            counted = {} if batch is None else self.counted(batch, index)
            if are_as_many(counted, result, supporters(result, words)):
                return f"a result of slice {index} that as many contradict"
        return None
