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
4. A failed call changes nothing; a mean that makes anchor or momentum infinite ends the peer.

Memory. Between rounds anchor, momentum and residual: 12 bytes a parameter. While an offer is out its pseudo-gradient beside
them, 4; what was sent is made for the encoder and given back. A merge goes tensor by tensor: the next anchor and momentum grow
beside the old ones, which others may hold still (8), the shift takes the pseudo-gradient's place, the next residual the old
one's: it is computed from what was offered, as it was for the encoder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilocox_peer.compression.aggregate import WeighedContributions
from dilocox_peer.compression.codec import CodecPolicy
from dilocox_peer.compression.contribution import Blob, ContributionEncoder, open_contribution, raw_bytes
from dilocox_peer.compression.feedback import decay_by_codec, residual_after, with_feedback, with_feedback_by_tensor
from dilocox_peer.compression.ladder import LOW_RANK
from dilocox_peer.compression.policy import policy_named
from dilocox_peer.errors import ConfigError, StateCorrupt
from dilocox_peer.manifest import Manifest, PublishedSection
from dilocox_peer.model.adapters import first_adapters
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.model.transformer import initial_parameters
from dilocox_peer.model.whole import tensor_over
from dilocox_peer.peer.planning.adaptive import needed_rank
from dilocox_peer.store.outline import Outline, outline_of
from dilocox_peer.types import Digest, Layout

if TYPE_CHECKING:
    from dilocox_peer.model.weights import ModelFolder

_LOOK_BYTES = 16 << 20  # looked at once for values that are not finite: the mask takes a quarter of that
TURNS = 4  # rounds in which every tensor is measured once: what its codec lost, what rank it needs


@dataclass(frozen=True, slots=True)
class OuterSettings:
    """learning_rate and momentum: of the outer Nesterov step. norm_clip: limits.norm_clip of the manifest.

    residual_decay: of every tensor; None: each by its codec (feedback.py).
    """

    learning_rate: float
    momentum: float
    codec_of: CodecPolicy
    residual_decay: float | None = None
    norm_clip: float = 4.0

    @classmethod
    def of(cls, manifest: Manifest) -> "OuterSettings":
        return cls(
            learning_rate=manifest.outer.learning_rate,
            momentum=manifest.outer.momentum,
            codec_of=stage_policy(manifest.compression.codec, manifest.compression.rank),
            norm_clip=manifest.limits.norm_clip,
        )


@dataclass(frozen=True)
class AnchorState:
    """What a stage has agreed on at a head: anchor and outer momentum, as immutable float32 bytes (little-endian).

    round: outer rounds completed. outline: of the anchor's bytes and then the momentum's, as the store gives them to others
    chunk by chunk. digest: its root, which certificates name.
    """

    layout: Layout
    head: Digest
    round: int
    anchor: memoryview
    momentum: memoryview
    outline: Outline

    @classmethod
    def of(
        cls,
        layout: Layout,
        *,
        head: Digest,
        round_number: int,
        anchor: Blob | memoryview,
        momentum: Blob | memoryview,
        outline: Outline | None = None,
    ) -> "AnchorState":
        """The state of these bytes. outline: where they were checked against it already. Raises StateCorrupt for wrong sizes or
        values that are not finite. Hashes and reads all, without the GIL: call it from a worker thread."""
        anchor_view, momentum_view = (memoryview(part).cast("B").toreadonly() for part in (anchor, momentum))
        for name, view in (("anchor", anchor_view), ("momentum", momentum_view)):
            if len(view) != raw_bytes(layout):
                raise StateCorrupt(f"{name} of {len(view)} bytes for a stage of {raw_bytes(layout)}")
            for start in range(0, len(view), _LOOK_BYTES):
                if not np.isfinite(np.frombuffer(view[start : start + _LOOK_BYTES], dtype="<f4")).all():
                    raise StateCorrupt(f"{name} holds values that are not finite")
        outline = outline_of((anchor_view, momentum_view)) if outline is None else outline
        return cls(layout, head, round_number, anchor_view, momentum_view, outline)

    @property
    def digest(self) -> Digest:
        return self.outline.root

    @property
    def size_bytes(self) -> int:
        return len(self.anchor) + len(self.momentum)

    def parts(self) -> tuple[memoryview, memoryview]:
        """Anchor, then momentum. Not copied; stays valid and unchanged while anyone holds it."""
        return self.anchor, self.momentum

    def chunk(self, index: int) -> Blob | memoryview:
        """The bytes of a chunk of its outline."""
        start, stop = self.outline.span(index)
        half = len(self.anchor)
        if start < half < stop:
            return b"".join((self.anchor[start:], self.momentum[: stop - half]))
        return self.anchor[start:stop] if stop <= half else self.momentum[start - half : stop - half]

    def anchor_N(self) -> Tensor:
        """The anchor as a new float32 vector."""
        return _vector(self.anchor)

    def momentum_N(self) -> Tensor:
        """The outer momentum as a new float32 vector."""
        return _vector(self.momentum)

    def shared(self) -> tuple[Tensor, Tensor]:
        """Anchor and momentum as they lie here, not copied: they must not be written to, and live as long as this does."""
        return tensor_over(np.frombuffer(self.anchor, "<f4")), tensor_over(np.frombuffer(self.momentum, "<f4"))


@dataclass(frozen=True, slots=True)
class Offer:
    """blob: the contribution. micro_batches: its weight, all that its pseudo-gradient holds, also of rounds that missed their
    certificate. raw_bytes: the pseudo-gradient's size as float32. lost: |residual|**2 / |sent|**2, what the codec left out,
    of a part of the tensors, another one each time."""

    blob: bytes
    micro_batches: int
    raw_bytes: int
    lost: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a merge. shift_N: to be added to the local parameters; its owner is who gets it. state: at the new head.
    needed_rank: that holds nearly all energy of the mean, 0 where nobody asked."""

    shift_N: Tensor
    state: AnchorState
    norms: tuple[float, ...]
    clip_factors: tuple[float, ...]
    needed_rank: int = 0


@dataclass(frozen=True, slots=True)
class _Offered:
    """decays: of each tensor's residual, as it was added to what blob encodes."""

    pseudo_gradient_N: Tensor
    blob: bytes
    decays: tuple[float, ...]
    micro_batches: int


class OuterOptimizer:
    """See the module. One owner thread; tensors given to it are its own from then on, tensors it gives are not."""

    def __init__(self, settings: OuterSettings, state: AnchorState) -> None:
        self._settings = settings
        self._layout = state.layout
        self._state = state
        self._anchor_N, self._momentum_N = state.shared()  # never written to
        self._residual_N = torch.zeros_like(self._anchor_N)
        self._scratch_N = torch.empty(max((spec.num_elements for spec in state.layout.tensors), default=0))
        self._codec_of = settings.codec_of
        self._encoder = ContributionEncoder(state.layout, settings.codec_of)
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

    def offer(self, snapshot_N: Tensor, micro_batches: int, *, codec_of: CodecPolicy | None = None) -> Offer:
        """The contribution of local parameters snapshot_N, with micro_batches done since the last snapshot.

        codec_of: of this contribution and those after it; the same object as long as it is the same codecs, as encoders
        that remember start anew with another. Takes snapshot_N over. Raises RuntimeError if an offer is out: merge or
        withdraw it first.
        """
        if self._offered is not None:
            raise RuntimeError("an offer is out: merge a certificate or withdraw it first")
        if codec_of is not None and codec_of is not self._codec_of:
            self._codec_of = codec_of
            self._encoder.use(codec_of)
        pseudo_gradient_N = torch.sub(self._anchor_N, snapshot_N, out=snapshot_N)
        decays = self._decays()
        sent_N = torch.empty_like(pseudo_gradient_N)
        with_feedback_by_tensor(pseudo_gradient_N, self._residual_N, self._layout, decays, out=sent_N)
        blob = self._encoder.encode(sent_N)
        sent, lost = 0.0, 0.0
        turn, self._turn = self._turn, (self._turn + 1) % TURNS
        decoding = open_contribution(blob, self._layout).decode_in_turn()
        for index, ((_spec, start, stop), decode) in enumerate(zip(self._layout.spans(), decoding, strict=True)):
            if index % TURNS == turn:  # in turn: all of them would cost a third of the offer
                part_N = sent_N[start:stop]
                sent += float(torch.dot(part_N, part_N))
                residual_after(part_N, decode(self._scratch_N))
                lost += float(torch.dot(part_N, part_N))
        self._unsettled += micro_batches
        self._offered = _Offered(pseudo_gradient_N, blob, decays, self._unsettled)
        self._lost = min(lost / sent, 1.0) if sent > 0 else self._lost
        return Offer(blob, self._unsettled, raw_bytes(self._layout), self._lost)

    def merge(
        self,
        blobs: Sequence[Blob],
        weights: Sequence[int],
        *,
        own: bool,
        round_number: int,
        head: Digest,
        rank_in_use: int = 0,
    ) -> Outcome:
        """One certificate: its blobs and their micro-batches in its order. own: whether our offer is among them.
        rank_in_use: of low rank, where the rank that the mean needs is to be measured; 0: it is not.

        No blobs is a void round: anchor and momentum stay as they are (momentum without a gradient would coast).
        An offer that is not among them is withdrawn: its pseudo-gradient goes with the next one.
        Raises MalformedBlob (the caller verified the blobs before), RuntimeError for own without an offer.
        """
        offered = self._offered
        if own and offered is None:
            raise RuntimeError(f"round {round_number} settles an offer of ours, and none is out")
        weighed = WeighedContributions(self._layout, blobs, weights, norm_clip=self._settings.norm_clip)
        if weighed.is_void:
            # Anchor and momentum stay; of an offer that was in it (nobody has trained) nothing is left to settle.
            shift_N, needed = torch.zeros_like(self._anchor_N), 0
            anchor_N, momentum_N = self._anchor_N, self._momentum_N
            anchor, momentum = self._state.anchor, self._state.momentum
            if own and offered is not None:
                shift_N.add_(offered.pseudo_gradient_N)
                self._settle(offered)
        else:
            shift_N = torch.empty_like(self._anchor_N) if offered is None else offered.pseudo_gradient_N
            settled = offered if own else None
            anchor_N, momentum_N, needed = self._step(weighed, settled, shift_N, rank_in_use, round_number)
            anchor, momentum = _buffer(anchor_N), _buffer(momentum_N)
        state = AnchorState.of(self._layout, head=head, round_number=round_number, anchor=anchor, momentum=momentum)
        if own and offered is not None:
            self._unsettled -= offered.micro_batches
        self._offered = None
        self._anchor_N, self._momentum_N, self._state = anchor_N, momentum_N, state
        return Outcome(shift_N, state, weighed.norms, weighed.clip_factors, needed)

    def _step(
        self,
        weighed: WeighedContributions,
        settled: _Offered | None,
        shift_N: Tensor,
        rank_in_use: int,
        round_number: int,
    ) -> tuple[Tensor, Tensor, int]:
        """(anchor', momentum', rank that the mean needs), tensor by tensor; shift_N takes the shift. settled: our own offer,
        whose pseudo-gradient may lie in shift_N."""
        lr, mu = self._settings.learning_rate, self._settings.momentum
        anchor_N, momentum_N = torch.empty_like(self._anchor_N), torch.empty_like(self._momentum_N)
        measured = self._measured_tensors(round_number) if rank_in_use else frozenset[str]()
        mean_N = torch.zeros(self._layout.num_elements if measured else 0)  # touched only where it is measured
        decoding = None if settled is None else open_contribution(settled.blob, self._layout).decode_in_turn()
        for index, (start, stop, mean) in enumerate(weighed.means()):
            part = slice(start, stop)
            if self._layout.tensors[index].name in measured:
                mean_N[part] = mean
            torch.mul(self._momentum_N[part], mu, out=momentum_N[part]).add_(mean)
            update = (momentum_N[part] * mu).add_(mean).mul_(-lr)  # "u" of the module's text
            torch.add(self._anchor_N[part], update, out=anchor_N[part])
            if settled is None or decoding is None:
                shift_N[part] = update
            else:
                self._settle_part(settled, index, part, next(decoding))
                torch.add(update, settled.pseudo_gradient_N[part], out=shift_N[part])
        needed = needed_rank(self._layout, mean_N, measured, rank=rank_in_use) if measured else 0
        return anchor_N, momentum_N, needed

    def _settle(self, offered: _Offered) -> None:
        decoding = open_contribution(offered.blob, self._layout).decode_in_turn()
        for index, ((_spec, start, stop), decode) in enumerate(zip(self._layout.spans(), decoding, strict=True)):
            self._settle_part(offered, index, slice(start, stop), decode)

    def _settle_part(self, offered: _Offered, index: int, part: slice, decode: Callable[[Tensor], Tensor]) -> None:
        """The residual of one tensor is what the codec lost of what was sent, which is computed as it was then."""
        residual = self._residual_N[part]
        with_feedback(offered.pseudo_gradient_N[part], residual, offered.decays[index], out=residual)
        residual_after(residual, decode(self._scratch_N))

    def withdraw(self) -> None:
        """The head moved under the offer, or its round is void: the pseudo-gradient is unsettled again and goes with the next
        offer. Nothing happens if none is out."""
        self._offered = None

    def install(self, state: AnchorState, *, keep_pseudo_gradient: bool) -> Tensor:
        """Adopts state. Returns what to do with the local parameters: with keep_pseudo_gradient the shift to add to them, so
        that a - w stays; else their new values, and pseudo-gradient, residual and counts start from nothing."""
        assert state.layout == self._layout, "a state of another layout"
        anchor_N, momentum_N = state.shared()
        self._offered = None
        local_N = anchor_N - self._anchor_N if keep_pseudo_gradient else anchor_N.clone()
        if not keep_pseudo_gradient:
            self._residual_N = torch.zeros_like(anchor_N)
            self._encoder.reset()
            self._unsettled = 0
        self._anchor_N, self._momentum_N, self._state = anchor_N, momentum_N, state
        return local_N

    def _measured_tensors(self, round_number: int) -> frozenset[str]:
        """A part of the matrices each round, in turn: a spectrum costs more than the rest of a merge."""
        names = [spec.name for spec in self._layout.tensors if self._codec_of(spec).name == LOW_RANK]
        return frozenset(names[round_number % TURNS :: TURNS])

    def _decays(self) -> tuple[float, ...]:
        """Of each tensor's residual."""
        if self._settings.residual_decay is None:
            return decay_by_codec(self._layout, self._codec_of)
        return (self._settings.residual_decay,) * len(self._layout.tensors)


def stage_policy(codec: str, rank: int) -> CodecPolicy:
    """The policy of a stage's contributions by a codec's name; rank: of lowrank-int4. Raises MalformedBlob for other names."""
    return policy_named(codec, rank=max(rank, 1))


def initial_state(manifest: Manifest, stage: int = 0, *, folder: "ModelFolder | None" = None) -> AnchorState:
    """The state before the first round, without momentum; equal on every peer.

    Of our own architecture seeded parameters; of a published model those in its folder, or adapters that do nothing yet. Raises
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
        layout, head=head, round_number=0, anchor=_buffer(anchor_N), momentum=momentum_N.data.cast("B")
    )


def _vector(raw: memoryview) -> Tensor:
    return torch.from_numpy(np.frombuffer(raw, dtype="<f4").astype(np.float32))


def _buffer(vector_N: Tensor) -> memoryview:
    """The vector's own bytes, read-only; it must not be changed any more."""
    array: npt.NDArray[np.float32] = vector_N.numpy().astype("<f4", copy=False)
    return array.data.cast("B").toreadonly()
