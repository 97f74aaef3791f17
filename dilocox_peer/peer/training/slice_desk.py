"""What a peer does with slices: checks those that come, and averages its own. Blocking; from worker threads.

What others send is hostile: a table is no larger than one can be, a slice is what its table says of it to the last bit of its norm, a result
decodes to a slice, a residual is finite and as long as its slice; neither is further than any round can come. All are named by their hash, which whoever fetched
them has checked.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from dilocox_peer.compression.aggregate import reach_of, squared_norm
from dilocox_peer.compression.allowed import AllowedCodecs
from dilocox_peer.compression.contribution import open_contribution
from dilocox_peer.compression.lengths import Squares
from dilocox_peer.compression.policy import policy_named
from dilocox_peer.compression.slices import (
    RESULT_CODEC,
    AveragedSlice,
    SliceInput,
    average_slice,
    check_part,
    check_residual,
    cut,
    read_table,
)
from dilocox_peer.errors import MalformedBlob
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.peer.rounds.contract import AverageSlice, BlobPart, BlobRefused, SliceAveraged
from dilocox_peer.peer.training.inner_reach import UNKNOWN, InnerReach
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import Digest, Layout
from dilocox_peer.wire.blobs import MAX_TABLE_BYTES, SliceTable
from dilocox_peer.wire.chain import SliceOutcome, inputs_of

RESULT_REACH, RESIDUAL_REACH = 4.0, 2.0
"""Times what a contribution may reach as a whole: what encodings have lost so far comes on top. Honest residuals came to 0.21 at the most
(docs/decisions/0022)."""
MAX_CHECKED = 1 << 14  # slices of tables whose norm is known to be what the table says
MAX_CHECKED_BYTES = 1 << 24  # of what is known of them: some hundred slices' of a billion parameters
MAX_READ = 64  # tables that are kept as they were read: of each a peer averages several slices


class SliceDesk:
    """Slices of one stage. blobs: where tables, slices, results and residuals lie."""

    def __init__(
        self,
        layout: Layout,
        count: int,
        *,
        norm_clip: float,
        blobs: Shelf,
        allowed: AllowedCodecs,
        reach: InnerReach = UNKNOWN,
    ) -> None:
        """layout: of the whole. allowed: what contributions may be. reach: of the inner optimizer."""
        self._cut = cut(layout, count)
        self._norm_clip, self._reach = norm_clip, reach
        self._blobs = blobs
        self._allowed, self._allowed_results = allowed, allowed.of_results()
        self._checked: OrderedDict[tuple[Digest, int], Squares] = OrderedDict()
        self._checked_bytes = 0
        self._lock = threading.Lock()
        self._read: OrderedDict[Digest, tuple[bytes, SliceTable]] = OrderedDict()

    def max_bytes(self, part: BlobPart) -> int:
        """That a blob may have."""
        if part.kind == "table":
            return MAX_TABLE_BYTES
        layout = self._cut.slices[part.slice]
        if part.kind == "residual":
            return 4 * layout.num_elements
        return (self._allowed_results if part.kind == "result" else self._allowed).max_bytes(layout)

    def check(self, blob: memoryview, part: BlobPart) -> tuple[Digest, ...]:
        """The slices that it names, of a table. Raises MalformedBlob."""
        match part.kind:
            case "table":
                return tuple(each.blob for each in read_table(blob, self._cut).parts)
            case "slice":
                assert part.table is not None, "a slice of no table"
                self._check_slice(part.table, self._table(part.table)[1], part.slice, blob, anew=True)
            case "result":
                result = open_contribution(blob, self._cut.slices[part.slice])
                self._allowed_results.check(result)
                longest = self._longest(RESULT_REACH)
                if squared_norm(result) > longest * longest:
                    raise MalformedBlob("a result further than any round can come")
            case "residual":
                check_residual(blob, self._cut.slices[part.slice], self._longest(RESIDUAL_REACH))
        return ()

    def _longest(self, times: float) -> float:
        """The norm that a slice's result or residual may have: two accomplices, who may falsify a slice between them (docs/decisions/0022), could else put any
        number there; in a residual it would be honest members that average with it and sign. The same in all rounds, whatever is planned."""
        most_rms = self._reach.most_rms(self._reach.longest)
        return times * reach_of(self._cut.layout.num_elements, most_rms)

    def average(self, action: AverageSlice) -> Sequence[BlobRefused | SliceAveraged]:
        """The result is durable then; what encoding lost outlives the process, not a power cut: the slice's other averager has it too. What is no longer
        here, or no good, is told. Raises OSError."""
        index, none = action.slice, SliceAveraged(action.inputs, action.slice, None)
        assert inputs_of(action.entries) == action.inputs, "other inputs"
        inputs: list[SliceInput] = []
        for entry in action.entries:
            try:
                raw, table = self._table(entry.blob)
                blob = self._mapped(table.parts[index].blob)
                squares = self._check_slice(entry.blob, table, index, blob)
            except MalformedBlob as error:
                return BlobRefused(entry.blob, str(error)), none
            except KeyError:
                return (none,)
            squared = tuple(part.squared for part in table.parts)
            inputs.append(SliceInput(raw, squared, blob, entry.micro_batches, squares))
        try:
            base, averaged = self._averaged(action, inputs)
        except (KeyError, MalformedBlob):
            return (none,)
        result, lost = self._blobs.put(averaged.blob), self._blobs.put(averaged.residual, durable=False)
        outcome = SliceOutcome(result, len(averaged.blob), base, lost)
        return (SliceAveraged(action.inputs, index, outcome),)

    def _averaged(self, action: AverageSlice, inputs: Sequence[SliceInput]) -> tuple[bytes, AveragedSlice]:
        """And the residual that went into it: none where the result with it is one that everybody else would refuse. Without one it cannot be: the mean is no
        longer than a contribution may be, and no code makes it twice as long. Raises KeyError, MalformedBlob."""
        layout, bases = self._cut.slices[action.slice], dict.fromkeys((action.base, b""))
        for base in bases:
            averaged = average_slice(
                layout, inputs, norm_clip=self._norm_clip, codec_of=policy_named(RESULT_CODEC[action.codec]),
                residual=self._mapped(Digest(base)) if base else b"", beacon=action.inputs, most_rms=self._reach.most_rms(action.inner_steps),
                num_elements=self._cut.layout.num_elements, longest_residual=self._longest(RESIDUAL_REACH),
            )  # fmt: skip
            try:
                self.check(averaged.blob, BlobPart("result", action.slice))
            except MalformedBlob as error:
                refused = error
            else:
                return base, averaged
        raise refused

    def _table(self, name: Digest) -> tuple[bytes, SliceTable]:
        """As it is, and what it says. Raises KeyError when it is not here, MalformedBlob."""
        if (known := self._read.get(name)) is not None:
            return known
        raw = bytes(self._mapped(name))
        known = self._read[name] = raw, read_table(raw, self._cut)
        while len(self._read) > MAX_READ:
            self._read.popitem(last=False)
        return known

    def _mapped(self, name: Digest) -> memoryview:
        """Raises KeyError when it is not here."""
        if (blob := self._blobs.mapped(name)) is None:
            raise KeyError(name)
        return blob

    def _check_slice(
        self, name: Digest, table: SliceTable, index: int, blob: memoryview, *, anew: bool = False
    ) -> Squares:
        """Its squares. Once: what else may have brought the same bytes here was checked for another table, or none."""
        if (known := self._checked.get((name, index))) is not None and not anew:
            return known
        self._allowed.check(open_contribution(blob, self._cut.slices[index]))
        found = check_part(blob, self._cut.slices[index], table.parts[index])
        with self._lock:
            before = self._checked.get((name, index))
            self._checked[name, index] = found
            self._checked_bytes += found.nbytes - (0 if before is None else before.nbytes)
            while len(self._checked) > MAX_CHECKED or self._checked_bytes > MAX_CHECKED_BYTES:
                self._checked_bytes -= self._checked.popitem(last=False)[1].nbytes
        return found


def contribution_layout(manifest: Manifest, stage: int) -> Layout:
    """Of a contribution to the stage: its tensors, cut where the run averages in slices."""
    layout, count = layout_of(manifest, stage), manifest.rounds.num_slices
    return cut(layout, count).layout if count else layout
