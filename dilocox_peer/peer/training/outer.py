"""The outer loop of one peer: anchor, outer momentum, residual, and the pseudo-gradient it has offered.

Pure arithmetic on flat float32 CPU vectors; no threads, no clock, no network. trainer.py decides who trains, and when; the
agreement on which contributions count is rounds/machine.py. Source: DiLoCo (arXiv 2311.08105, algorithm 1) and DiLoCoX
(2506.21263, one-step-delay overlap).

With anchor a, local parameters w, snapshot s = w at a round's close, residual e:
    pseudo-gradient d = a - s;  sent = d + decay * e;  offered = encode(sent);  e' = sent - decode(offered)
    mean g of the certified contributions;  m' = mu * m + g;  u = -lr * (g + mu * m');  a' = a + u
    own contribution certified:  w += u + d, e = e'       else:  w += u, e stays, d is still part of a' - w
Differs from DiLoCoX in form, not in value: the shift is u + d, not (a + u) - s. Rounding then cancels where it should:
one peer with lr 1, momentum 0 and no codec gets a shift of exactly 0.

Invariants
1. Anchor and momentum change only in `merge` with contributions, and in `install`; equal blobs give equal bits.
2. decode(offered) + e' = sent, to one rounding (I6 of tests/sim/invariants.py).
3. Every local pseudo-gradient enters a certified contribution once: a - w is what is unsettled, and the offered part leaves it
   only when settled (I5).
4. A failed call changes nothing, but a merge that fails once it has begun to write: residual and pseudo-gradient are changed in part then, and every
   call after it is refused; a mean that makes anchor or momentum infinite ends the peer.

Memory. The residual, 4 bytes a parameter; while an offer is out its pseudo-gradient, 4, and the contribution; what was sent is made
for the encoder a tensor at a time. Anchor and momentum lie in the file that they are kept in (anchor_state.py), of which a piece at a
time is at hand. A merge goes piece by piece, on as many threads as the crew has: the next anchor and momentum grow in a file beside
the old one, which others may be reading still, the shift takes the pseudo-gradient's place, the next residual the old one's: it is
computed from what was offered, as it was for the encoder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilocox_peer.compression.aggregate import WeighedContributions
from dilocox_peer.compression.codec import CodecPolicy
from dilocox_peer.compression.contribution import Blob, Contribution, ContributionEncoder, open_contribution
from dilocox_peer.compression.feedback import decay_by_codec, residual_after, with_feedback
from dilocox_peer.compression.ladder import LOW_RANK
from dilocox_peer.compression.lengths import Squares
from dilocox_peer.compression.policy import policy_named
from dilocox_peer.compression.reader import PIECE, Payload, pieces
from dilocox_peer.compression.sizes import raw_bytes
from dilocox_peer.compression.slices import CertifiedMean, cut, joined, sliced_payloads, table_of
from dilocox_peer.errors import ConfigError
from dilocox_peer.manifest import Manifest, PublishedSection
from dilocox_peer.model.adamw import StochasticRounding
from dilocox_peer.model.adapters import first_adapters
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.model.transformer import initial_parameters
from dilocox_peer.peer.planning.spectrum import needed_rank
from dilocox_peer.peer.training.anchor_state import AnchorState, GrowingInMemory, GrowingState, buffer_of
from dilocox_peer.peer.training.crew import Crew
from dilocox_peer.peer.training.given_back import give_back_by_piece
from dilocox_peer.peer.training.inner_reach import UNKNOWN, InnerReach
from dilocox_peer.peer.training.outer_contract import AnchorMoved
from dilocox_peer.peer.training.outer_step import Before, OuterStep, Settlement
from dilocox_peer.store.outline import Outline
from dilocox_peer.types import Digest, Layout, TensorSpec

if TYPE_CHECKING:
    from dilocox_peer.model.weights import ModelFolder

Grow = Callable[[Digest, int], GrowingState]
"""Begins the state at a head, of so many rounds."""

TURNS = 4  # rounds in which every tensor is measured once: what its codec lost, what rank it needs


@dataclass(frozen=True, slots=True)
class OuterSettings:
    """learning_rate and momentum: of the outer Nesterov step. norm_clip: limits.norm_clip of the manifest.

    residual_decay: of every tensor; None: each by its codec (feedback.py). is_residual_halved: kept in bfloat16, rounded stochastically.
    slices: in which the run averages; 0: all to all. reach: of the inner optimizer.
    """

    learning_rate: float
    momentum: float
    codec_of: CodecPolicy
    residual_decay: float | None = None
    norm_clip: float = 4.0
    is_residual_halved: bool = False
    slices: int = 0
    reach: InnerReach = UNKNOWN

    @classmethod
    def of(cls, manifest: Manifest) -> "OuterSettings":
        return cls(
            learning_rate=manifest.outer.learning_rate,
            momentum=manifest.outer.momentum,
            codec_of=stage_policy(manifest.compression.codec, manifest.compression.rank),
            norm_clip=manifest.limits.norm_clip,
            is_residual_halved=manifest.compression.residual == "bfloat16",
            slices=manifest.rounds.num_slices,
            reach=InnerReach.of(manifest),
        )


@dataclass(frozen=True, slots=True)
class OwnContribution:
    """blob: the contribution; of one in slices its table. micro_batches: its weight, all that its pseudo-gradient holds, also of rounds that missed their
    certificate. raw_bytes: the pseudo-gradient's size as float32. lost: |residual|**2 / |sent|**2, what the codec left out,
    of a part of the tensors, another one each time."""

    blob: memoryview
    micro_batches: int
    raw_bytes: int
    lost: float
    slices: tuple[memoryview, ...] = ()


@dataclass(frozen=True, slots=True)
class _Offered:
    """decays: of each tensor's residual, as it was added to what contribution encodes."""

    pseudo_gradient_N: Tensor
    contribution: Contribution
    decays: tuple[float, ...]
    micro_batches: int


class OuterOptimizer:
    """See the module. One owner thread; tensors given to it are its own from then on, tensors it gives are not. anchor_N,
    residual_N: float32, to be read."""

    def __init__(
        self, settings: OuterSettings, state: AnchorState, *, crew: Crew | None = None, grow: Grow | None = None
    ) -> None:
        """crew: who does the work of a merge; None: the caller's thread alone. grow: where states grow; None: in memory."""
        self._settings = settings
        self._crew = crew or Crew()
        self._grow: Grow = grow or (lambda head, number: GrowingInMemory(state.layout, head, number))
        self._cut = cut(state.layout, settings.slices) if settings.slices else None
        self._layout = (
            state.layout if self._cut is None else self._cut.layout
        )  # the same vector, in tensors or their parts
        self._state = state
        self.anchor_N, self._momentum_N = state.shared()  # never written to
        self.residual_N = self._no_residual()
        self._rounding = StochasticRounding(PIECE if settings.is_residual_halved else 0)
        self._merges = 0
        self._is_spoilt = False
        self._codec_of = settings.codec_of
        self._encoder = ContributionEncoder(self._layout, settings.codec_of)
        self._unsettled = 0
        self._offered: _Offered | None = None
        self._turn, self._lost = 0, 0.0

    @property
    def state(self) -> AnchorState:
        return self._state

    @property
    def unsettled_micro_batches(self) -> int:
        """Micro-batches handed to `offer` whose pseudo-gradient no certificate has settled."""
        return self._unsettled

    @property
    def has_offer(self) -> bool:
        return self._offered is not None

    def offer(
        self, snapshot_N: Tensor, micro_batches: int, *, codec_of: CodecPolicy | None = None, sliced: bool = False
    ) -> OwnContribution:
        """The contribution of local parameters snapshot_N, with micro_batches done since the last snapshot.

        codec_of: of this contribution and those after it; the same object as long as it is the same codecs, as encoders
        that remember start anew with another. sliced: in slices. Takes snapshot_N over. Raises RuntimeError if an offer is out: merge or
        withdraw it first.
        """
        self._require_whole()
        if self._offered is not None:
            raise RuntimeError("an offer is out: merge a certificate or withdraw it first")
        if codec_of is not None and codec_of is not self._codec_of:
            self._codec_of = codec_of
            self._encoder.use(codec_of)
        pseudo_gradient_N = snapshot_N
        decays = self._decays()
        sent_X = torch.empty(max((spec.num_elements for spec in self._layout.tensors), default=0))
        turn, self._turn = self._turn, (self._turn + 1) % TURNS
        payloads: list[Payload] = []
        sent, lost = 0.0, 0.0
        for index, (spec, start, stop) in enumerate(self._layout.spans()):
            self._crew.require_going()
            part_N = with_feedback(
                torch.sub(self.anchor_N[start:stop], snapshot_N[start:stop], out=pseudo_gradient_N[start:stop]),
                self.residual_N[start:stop],
                decays[index],
                out=sent_X[: stop - start],
            )
            self._state.let_go(start, stop)
            payloads.append(self._encoder.encode_tensor(index, part_N.view(spec.shape)))
            if index % TURNS == turn:  # in turn: all of them would cost a third of the offer
                sent += float(torch.dot(part_N, part_N))
                lost += self._lost_of(spec, payloads[-1], part_N)
        give_back_by_piece(sent_X)
        del sent_X
        self._lost = min(lost / sent, 1.0) if sent > 0 else self._lost
        slices: tuple[memoryview, ...] = ()
        if sliced:
            assert self._cut is not None, "a run that averages all to all"
            slices = sliced_payloads(self._cut, self._codec_of, payloads)
            blob, contribution = memoryview(table_of(self._cut, slices)), joined(self._cut, slices)
        else:
            blob = self._encoder.joined(payloads)
            contribution = open_contribution(blob, self._layout)
        self._unsettled += micro_batches
        self._offered = _Offered(pseudo_gradient_N, contribution, decays, self._unsettled)
        return OwnContribution(blob, self._unsettled, raw_bytes(self._layout), self._lost, slices)

    def _lost_of(self, spec: TensorSpec, payload: Payload, sent_N: Tensor) -> float:
        """|residual|**2 of a tensor, which is written over sent."""
        reader = self._codec_of(spec).open(memoryview(payload), spec.shape)
        decoded_X = torch.empty(PIECE)
        for start, stop in pieces(len(sent_N)):
            decoded = decoded_X[: stop - start]
            reader.read(start, stop, decoded)
            residual_after(sent_N[start:stop], decoded)
        return float(torch.dot(sent_N, sent_N))

    def merge(
        self,
        blobs: Sequence[Blob],
        weights: Sequence[int],
        *,
        own: bool,
        round_number: int,
        head: Digest,
        inner_steps: int = 0,
        rank_in_use: int = 0,
        squares: Sequence[Squares | None] = (),
        are_results: bool = False,
    ) -> tuple[AnchorMoved, Tensor]:
        """One certificate: its blobs and their micro-batches in its order. What came of it, and shift_N, float32, to be added to the local parameters;
        the caller owns it. `state` is at the new head then. own: whether our offer is among them.
        inner_steps: H by the certificate's plan: as far as the inner optimizer comes in it, and REACH times as far, a contribution may reach.
        rank_in_use: of low rank, where the rank that the mean needs is to be measured; 0: it is not.
        squares: those of the blobs that are known (aggregate.py). are_results: the blobs are not those of the contributions, but what the slices
        of their mean came to.

        No blobs is a void round: anchor and momentum stay as they are (momentum without a gradient would coast).
        An offer that is not among them is withdrawn: its pseudo-gradient goes with the next one.
        Raises MalformedBlob (the caller verified the blobs before), RuntimeError for own without an offer, InterruptedError of a
        crew that is stopped, OSError of the disk: after these two nothing more can be asked of this object, and RuntimeError says so.
        """
        self._require_whole()
        offered = self._offered
        if own and offered is None:
            raise RuntimeError(f"round {round_number} settles an offer of ours, and none is out")
        # What nobody worked for weighs nothing in the mean: were it settled, what it carries of earlier rounds' residual would be nowhere.
        own = own and offered is not None and offered.micro_batches > 0
        weighed: WeighedContributions | CertifiedMean
        if are_results:
            assert self._cut is not None, "results of a run that averages all to all"
            weighed = CertifiedMean(self._cut, blobs, is_void=not any(weights))
        else:
            weighed = WeighedContributions(
                self._layout, blobs, weights, norm_clip=self._settings.norm_clip, squares=squares, beacon=head,
                most_rms=self._settings.reach.most_rms(inner_steps),
            )  # fmt: skip
        if weighed.is_void:
            # Anchor and momentum stay; an offer of ours that was in it, and counts nothing, is settled.
            shift_N, needed = torch.zeros_like(self.anchor_N), 0
            state = replace(self._state, head=head, round=round_number)
            if own and offered is not None:
                shift_N.add_(offered.pseudo_gradient_N)
                self._settle(offered)
            self.withdraw()  # its pseudo-gradient is in the shift, or goes with the next offer
        else:
            shift_N = torch.empty_like(self.anchor_N) if offered is None else offered.pseudo_gradient_N
            settled = offered if own else None
            growing = self._grow(head, round_number)
            try:
                needed, outline = self._step(weighed, settled, shift_N, growing, rank_in_use, round_number)
                state = growing.finish(outline)
            except BaseException:
                self._is_spoilt = True
                growing.discard()
                raise
        self._merges += 1
        if own and offered is not None:
            self._unsettled -= offered.micro_batches
        self._offered = None
        self._state = state
        self.anchor_N, self._momentum_N = state.shared()
        return AnchorMoved(state.digest, weighed.norms, weighed.clip_factors, needed), shift_N

    def _require_whole(self) -> None:
        if self._is_spoilt:
            raise RuntimeError("a merge failed half way: begin anew from the state on the disk")

    def _step(
        self,
        weighed: WeighedContributions | CertifiedMean,
        settled: _Offered | None,
        shift_N: Tensor,
        growing: GrowingState,
        rank_in_use: int,
        round_number: int,
    ) -> tuple[int, Outline]:
        """(the rank that the mean needs, the outline of what has grown). settled: our own offer, whose pseudo-gradient may lie in shift_N. Raises
        StateCorrupt when it comes to values that are not finite."""
        measured = self._measured_tensors(round_number) if rank_in_use else frozenset[str]()
        mean_N = torch.zeros(self._layout.num_elements if measured else 0)  # touched only where it is measured
        settlement = None
        if settled is not None:
            settlement = Settlement(
                settled.contribution, settled.pseudo_gradient_N, partial(self._settle_part, settled)
            )
        before = Before(self._layout, self.anchor_N, self._momentum_N, self._state.let_go)
        step = OuterStep(
            before, weighed, learning_rate=self._settings.learning_rate, momentum=self._settings.momentum, round_number=round_number,
        )  # fmt: skip
        outline = step.take(self._crew, growing, shift_N, settlement=settlement, measured=measured, mean_N=mean_N)
        needed = needed_rank(self._layout, mean_N, measured, rank=rank_in_use) if measured else 0
        give_back_by_piece(mean_N)
        return needed, outline

    def _settle(self, offered: _Offered) -> None:
        contribution, decoded_X = offered.contribution, torch.empty(PIECE)
        for index, (spec, first, _stop) in enumerate(self._layout.spans()):
            reader = contribution.open(index)
            for start, stop in pieces(spec.num_elements):
                decoded = decoded_X[: stop - start]
                reader.read(start, stop, decoded)
                self._settle_part(offered, index, slice(first + start, first + stop), decoded)

    def _settle_part(self, offered: _Offered, index: int, part: slice, decoded: Tensor) -> None:
        """The residual of a part of a tensor, a piece at most, is what the codec lost of what was sent, which is computed as it was
        then."""
        residual, is_halved = self.residual_N[part], self._settings.is_residual_halved
        out = None if is_halved else residual
        sent = with_feedback(offered.pseudo_gradient_N[part], residual, offered.decays[index], out=out)
        residual_after(sent, decoded)
        if is_halved:
            self._rounding.store(sent, residual, self._merges * self._layout.num_elements + part.start)

    def _no_residual(self) -> Tensor:
        dtype = torch.bfloat16 if self._settings.is_residual_halved else torch.float32
        return torch.zeros(self._layout.num_elements, dtype=dtype)

    def withdraw(self) -> None:
        """The head moved under the offer, or its round is void: the pseudo-gradient is unsettled again and goes with the next
        offer. Nothing happens if none is out."""
        if self._offered is not None:
            give_back_by_piece(self._offered.pseudo_gradient_N)
        self._offered = None

    def vectors(self) -> list[Tensor]:
        """All that is as long as the parameters and not a state's: for who ends the training."""
        return [self.residual_N, *([] if self._offered is None else [self._offered.pseudo_gradient_N])]

    def install(self, state: AnchorState, *, keep_pseudo_gradient: bool) -> Tensor:
        """Adopts state. Returns what to do with the local parameters: with keep_pseudo_gradient the shift to add to them, so
        that a - w stays; else their new values, and pseudo-gradient, residual and counts start from nothing."""
        assert state.layout == self._state.layout, "a state of another layout"
        anchor_N, momentum_N = state.shared()
        self.withdraw()
        local_N = anchor_N - self.anchor_N if keep_pseudo_gradient else anchor_N.clone()
        for each in (state, self._state):
            each.let_go()
        if not keep_pseudo_gradient:
            give_back_by_piece(self.residual_N)
            self.residual_N = self._no_residual()
            self._encoder.reset()
            self._unsettled = 0
        self.anchor_N, self._momentum_N, self._state = anchor_N, momentum_N, state
        return local_N

    def _measured_tensors(self, round_number: int) -> frozenset[str]:
        """A part of the matrices each round, in turn: a spectrum costs more than the rest of a merge."""
        names = [spec.name for spec in self._layout.tensors if self._codec_of(spec).name == LOW_RANK]
        return frozenset(names[round_number % TURNS :: TURNS])

    def _decays(self) -> tuple[float, ...]:
        """The decay of each tensor's residual."""
        if self._settings.residual_decay is None:
            return decay_by_codec(self._layout, self._codec_of)
        return (self._settings.residual_decay,) * len(self._layout.tensors)


def stage_policy(codec: str, rank: int) -> CodecPolicy:
    """The policy of a stage's contributions by a codec's name; rank: of lowrank-int4. Raises MalformedBlob for other names."""
    return policy_named(codec, rank=max(rank, 1))


def initial_state(manifest: Manifest, stage: int = 0, *, folder: "ModelFolder | None" = None) -> AnchorState:
    """The state before the first round, without momentum; equal on every peer.

    Our own architecture has seeded parameters; a published model those in its folder, or adapters that do nothing yet. Raises
    ConfigError when they are not those that the run began with, or there is no folder.
    """
    layout, section = layout_of(manifest, stage), manifest.model
    if isinstance(section, PublishedSection) and not section.starts_from_files:
        anchor_N = first_adapters(layout)
    elif isinstance(section, PublishedSection):
        if folder is None:
            raise ConfigError(f"the weights of {section.source} are not here: pass --model with a folder that has them")
        from dilocox_peer.model.published import design_of

        anchor_N = folder.stage_parameters(design_of(section), layout)
    else:
        anchor_N = initial_parameters(layout, section, manifest.run.seed)
    state = first_state(layout, anchor_N, head=manifest.genesis(stage))
    if not isinstance(section, PublishedSection) or state.digest.hex() == section.genesis[stage]:
        return state
    if folder is None or not section.starts_from_files:
        raise ConfigError(
            f"stage {stage}'s adapters begin otherwise here than in the run: install the version of its owner"
        )
    raise ConfigError(
        f"{folder.path}: its weights are not those of the run's stage {stage} (hash {state.digest.hex()[:12]}, the run began "
        f"with {section.genesis[stage][:12]}): take {' '.join(filter(None, (section.source, section.revision)))}"
    )


def first_state(layout: Layout, anchor_N: Tensor, *, head: Digest) -> AnchorState:
    """The state of these parameters before any round. They must not be changed any more."""
    momentum_N: npt.NDArray[np.float32] = np.zeros(layout.num_elements, "<f4")  # never written: it takes no memory
    return AnchorState.of(
        layout, head=head, round_number=0, anchor=buffer_of(anchor_N), momentum=momentum_N.data.cast("B")
    )
