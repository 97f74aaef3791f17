"""Training of several replicas in one process, through the peer's own code: what benchmarks/learning.py runs.

One tick is one inner step of a replica of full speed. Replicas take their steps one after the other, each with its own
Stage, InnerOptimizer and OuterLoop; a round is over when together they did their shares (RoundClock's rule), its blobs are
merged by each replica some ticks later. There is no network: when a round arrives is part of the method. After every
merge all anchors must be equal to the bit. Equal method, seed and text give equal numbers on the same machine.

The synchronous references are one model and one optimizer on the batch of all replicas: what an exact AllReduce of
gradients after every step computes. All methods of a seed see the same initial parameters and the same draws.

What a peer sends in a round is counted from the real blobs and the real encoded messages (`bytes_of_round`).
"""

import copy
import dataclasses
import fnmatch
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilocox_peer.compression.aggregate import aggregate
from dilocox_peer.compression.codec import CODECS, CodecPolicy, TensorCodec, codec_named
from dilocox_peer.compression.contribution import Blob, ContributionEncoder, decode_contribution
from dilocox_peer.compression.feedback import decay_by_codec, residual_after, with_feedback
from dilocox_peer.compression.names import VECTOR_CODEC
from dilocox_peer.compression.policy import policy_named
from dilocox_peer.compression.reader import TensorReader
from dilocox_peer.compression.sizes import CHUNK, matrix_shape
from dilocox_peer.config import preset
from dilocox_peer.data.corpus import Corpus
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.adamw import FusedAdamW
from dilocox_peer.model.inner import InnerOptimizer, schedule
from dilocox_peer.model.stage import Stage, build_stage
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.peer.training.outer import OuterOptimizer, OuterSettings, initial_state
from dilocox_peer.peer.training.outer_contract import AnchorMoved
from dilocox_peer.types import Digest, Layout, PeerId, TensorSpec
from dilocox_peer.wire.chain import Certificate, Entry, Plan, Value
from dilocox_peer.wire.rounds import Ack, Cert, Heartbeat, Message, Offer, Propose, encode_message

EMA_DECAY = 0.8  # of the running average of anchors, a round
HEARTBEATS = 4  # to every other peer, assumed for a round of a few seconds
FRAME_BYTES = 64  # around a message or 64 KiB of a blob: request, length, yamux and TLS records; TCP/IP is not counted
CURVE_POINTS = 10
CURVE_BYTES = 48 * 1024


@dataclass(frozen=True, slots=True)
class Method:
    """How to train. sync: one model on the batch of all replicas; the fields after optimizer and rate do not count then.

    inner_steps: H; inner_steps_until: (share of the steps, H) pairs that hold before it. arrivals: how much of a round
    later each replica merges, cycled over the replicas; 0 blocks, 1 is one-step. codec: a name (topk:N keeps at most N of
    every 4096), or `pattern=name` pairs separated by spaces, the first that fits a tensor's name counts. skip: (pattern, n): tensors that are sent in every n-th
    round only. residual_decay: None is the codec's own. speeds: steps a tick, cycled. stale_share: of a step's sequences
    that go through the version before (carry). warm_steps: synchronous steps before, whose bytes are
    not counted. momentum_every: delayed Nesterov.

    What the swarm's protocol does not have, to see what it would bring: island: replicas that train as one, on the draws of
    all of them, with nothing counted inside. owner_codec: reduce-scatter, where the owner of each part sends its mean on in
    this codec and keeps what that loses; copies: how many owners of a part each contribution goes to. momentum_codec: Muon's momentum goes with the pseudo-gradient, and its mean replaces it.
    """

    name: str
    optimizer: str = "muon"
    learning_rate: float = 8e-3
    sync: bool = False
    inner_steps: int = 32
    inner_steps_until: tuple[tuple[float, int], ...] = ()
    codec: str = "int2"
    rank: int = 16
    arrivals: tuple[float, ...] = (0.25,)
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.6
    residual_decay: float | None = None
    skip: tuple[str, int] = ("", 1)
    speeds: tuple[float, ...] = (1.0,)
    stale_share: float = 0.0
    warm_steps: int = 0
    momentum_every: int = 1
    steps_share: float = 1.0
    """Of the steps that --tokens allows: for paired comparisons of methods of the same share."""
    island: int = 1
    owner_codec: str = ""
    momentum_codec: str = ""
    moments: str = "float32"
    residual: str = "float32"
    copies: int = 1

    def key(self) -> str:
        """Equal for methods that compute the same, whatever their name. Fields newer than the first results count only
        where they are set."""
        fields = dataclasses.asdict(self)
        del fields["name"]
        for newer in ("island", "owner_codec", "momentum_codec", "moments", "residual", "copies"):
            if fields[newer] == type(self).__dataclass_fields__[newer].default:
                del fields[newer]
        return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Of one run. curve: (tokens of all replicas, bytes a peer sent, validation loss of the anchor on a part of the split).

    loss, ema_loss: on the whole split, nats a byte, of the last anchor and of the average of anchors. all_reduce_bytes: what
    a ring AllReduce of float32 gradients after every step would have sent. seconds: of CPU.
    """

    steps: int
    tokens: int
    loss: float
    ema_loss: float
    worst_jump: float
    bytes_sent: int
    all_reduce_bytes: int
    blob_bytes: int
    rounds: int
    curve: tuple[tuple[int, int, float], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Study:
    """What all methods of a seed share."""

    corpus: Corpus
    num_replicas: int
    tokens: int
    seed: int
    preset: str = "tiny"

    def manifest(self, method: Method) -> Manifest:
        known_codec = method.codec if method.codec in CODECS else "int2"  # what the manifest has no word for: _policy
        return preset(
            self.preset,
            run={"seed": self.seed},
            inner={"optimizer": method.optimizer, "learning_rate": method.learning_rate, "moments": method.moments},
            outer={"learning_rate": method.outer_learning_rate, "momentum": method.outer_momentum},
            rounds={"total": 1, "inner_steps": method.inner_steps},
            compression={"codec": known_codec, "rank": method.rank, "residual": method.residual},
        )

    def steps(self, method: Method) -> int:
        manifest = self.manifest(method)
        each = manifest.inner.micro_batch * manifest.model.context * self.num_replicas
        return max(1, round(self.tokens * method.steps_share / each))


def run(study: Study, method: Method, report: Callable[[str], None] = lambda _line: None) -> Outcomes:
    """Trains to the end and evaluates."""
    started = time.process_time()
    outcomes = _synchronous(study, method, report) if method.sync else Swarm(study, method, report).run()
    return dataclasses.replace(outcomes, seconds=round(time.process_time() - started, 1))


class SkipCodec:
    """Sends nothing of a tensor; all of it stays in the residual. Decodable: an empty top-k."""

    name = "topk"
    is_finite = True

    def encode(self, x: Tensor) -> bytes:
        return codec_named(self.name).encode(torch.zeros(x.shape))  # type: ignore[return-value]

    def open(self, payload: memoryview, shape: tuple[int, ...]) -> TensorReader:
        return codec_named(self.name).open(payload, shape)

    def decode(self, payload: memoryview, out: Tensor) -> None:
        codec_named(self.name).decode(payload, out)


class SparserTopK(SkipCodec):
    """topk that keeps at most `kept` of every chunk: what is smaller stays in the residual."""

    def __init__(self, kept: int) -> None:
        self._kept = kept

    def encode(self, x: Tensor) -> bytes:
        flat_N = x.detach().flatten().clone()
        for chunk in flat_N.split(CHUNK):
            kept = -(-len(chunk) * self._kept // CHUNK)
            chunk[chunk.abs().topk(len(chunk) - kept, largest=False).indices] = 0.0
        return bytes(codec_named(self.name).encode(flat_N.view(x.shape)))


class DelayedNesterovLoop(OuterOptimizer):
    """Delayed Nesterov (Liu et al., arXiv 2401.09135): every round is a plain step, the momentum moves once in `every`
    rounds, by the mean of those rounds' gradients, and is applied in equal parts."""

    def __init__(self, settings: OuterSettings, state: AnchorState, *, every: int) -> None:
        plain = dataclasses.replace(settings, momentum=0.0)
        super().__init__(plain, state)
        self._every, self._mu, self._eta = every, settings.momentum, settings.learning_rate
        self._gathered_N = torch.zeros_like(state.anchor_N())
        self._slow_N = torch.zeros_like(self._gathered_N)
        self._count = 0

    def merge(self, *contributions: Any, head: Digest, round_number: int, **more: Any) -> tuple[AnchorMoved, Tensor]:
        moved, shift_N = super().merge(*contributions, head=head, round_number=round_number, **more)
        gradient_N = self.state.momentum_N()  # with momentum 0 the mean itself
        self._gathered_N += gradient_N
        self._count += 1
        if self._count % self._every == 0:
            self._slow_N.mul_(self._mu).add_(self._gathered_N, alpha=1 / self._every)
            self._gathered_N.zero_()
        extra_N = self._slow_N * (-self._eta * self._mu)
        anchor_N = self.state.anchor_N() + extra_N
        state = AnchorState.of(
            self.state.layout, head=head, round_number=round_number,
            anchor=memoryview(anchor_N.numpy().data).cast("B"), momentum=self.state.momentum,
        )  # fmt: skip
        self.anchor_N, self._state = anchor_N, state
        return dataclasses.replace(moved, state_digest=state.digest), shift_N + extra_N


class _Owner:
    """The owners of all parts of the parameters, in one: they encode the mean once more, with a residual of their own."""

    def __init__(self, settings: OuterSettings, layout: Layout, codec_of: CodecPolicy) -> None:
        self._settings, self._layout = settings, layout
        self._encoder = ContributionEncoder(layout, codec_of)
        self._decay = (
            decay_by_codec(layout, codec_of)[0] if settings.residual_decay is None else settings.residual_decay
        )
        self._residual_N = torch.zeros(layout.num_elements)

    def blob(self, blobs: Sequence[Blob], weights: Sequence[int]) -> bytes:
        mean_N = aggregate(self._layout, blobs, weights, norm_clip=self._settings.norm_clip).mean_N
        assert mean_N is not None
        sent_N = with_feedback(mean_N, self._residual_N, self._decay)
        blob, decoded_N = self._encoder.encode(sent_N), torch.empty_like(sent_N)
        decode_contribution(blob, self._layout, decoded_N)
        self._residual_N = residual_after(sent_N, decoded_N)
        return blob


class _Replica:
    def __init__(self, study: Study, method: Method, index: int, manifest: Manifest, settings: OuterSettings) -> None:
        self.stage = build_stage(manifest)
        self.optimizer = InnerOptimizer(self.stage.model, manifest.inner)
        state = initial_state(manifest)
        if method.momentum_every > 1:
            self.loop: OuterOptimizer = DelayedNesterovLoop(settings, state, every=method.momentum_every)
        else:
            self.loop = OuterOptimizer(settings, state)
        self.peers = [peer_name(index * method.island + each) for each in range(method.island)]
        self.speed = method.speeds[index % len(method.speeds)]
        self.arrival = method.arrivals[index % len(method.arrivals)]
        self.credit = 0.0
        self.draws = 0
        self.in_round = 0
        self._study, self._inner, self._context = study, manifest.inner, manifest.model.context
        self._stale = None
        self._num_stale = round(manifest.inner.micro_batch * method.stale_share)
        if self._num_stale:
            model = self.stage.model
            before = model.version()
            before.flat_N.copy_(model.flat_N)
            self._stale = Stage(before)

    def step(self, share: float) -> None:
        inputs_BT, targets_BT = batch_of(self._study, self.peers, self.draws, self._inner.micro_batch, self._context)
        if self._stale is None:
            self.stage.train_micro_batch(inputs_BT, targets_BT)
            self.optimizer.step(micro_batches=1, share=share)
        else:  # the version before for those that were under way at the last step, as carry has it
            old, batch = self._num_stale, len(inputs_BT)
            for stage, part in ((self._stale, slice(0, old)), (self.stage, slice(old, batch))):
                if part.stop > part.start:
                    weight = (part.stop - part.start) / batch
                    kept_N = stage.model.flat_grad_N.clone()
                    stage.model.zero_grad()
                    stage.train_micro_batch(inputs_BT[part], targets_BT[part])
                    stage.model.flat_grad_N.mul_(weight).add_(kept_N)
            self._stale.model.flat_N.copy_(self.stage.model.flat_N)
            self.optimizer.step(micro_batches=1, share=share)
        self.draws += 1
        self.in_round += 1

    def momenta(self) -> list[Tensor]:
        """Muon's, as it keeps them; nobody's copies."""
        return [batch.momentum_XRC for batch in self.optimizer._muon._batches] if self.optimizer._muon else []


@dataclass(frozen=True, slots=True)
class Pending:
    round: int
    blobs: tuple[Blob, ...]
    weights: tuple[int, ...]
    closed_at: int  # tick
    waiting: frozenset[int]
    momenta: tuple[tuple[list[Tensor], list[Tensor]], ...] = ()  # of each replica: at the close, and the mean's decoded


class Swarm:
    def __init__(self, study: Study, method: Method, report: Callable[[str], None]) -> None:
        self._study, self._method, self._report = study, method, report
        manifest = study.manifest(method)
        self._steps = study.steps(method)
        self._round = 1
        settings = OuterSettings.of(manifest)
        settings = dataclasses.replace(
            settings, codec_of=self._policy(manifest, method.codec), residual_decay=method.residual_decay
        )
        self._count = study.num_replicas // method.island
        self._replicas = [_Replica(study, method, index, manifest, settings) for index in range(self._count)]
        self._lengths = list(_round_lengths(method, self._steps - method.warm_steps))
        self.evaluator = Evaluator(study, manifest, self._steps)
        self._manifest = manifest
        self._owner = (
            _Owner(settings, self._replicas[0].loop.state.layout, self._policy(manifest, method.owner_codec))
            if method.owner_codec
            else None
        )
        self._pending: Pending | None = None
        self._tick = 0
        self._bytes = 0
        self._blob_bytes = 0
        self._done_rounds_steps = method.warm_steps
        self._ema_N = self._anchor_N()

    def run(self) -> Outcomes:
        method, count = self._method, self._count
        if method.warm_steps:
            self._warm_up()
        for number, length in enumerate(self._lengths, 1):
            self._round = number
            for replica in self._replicas:
                replica.in_round = 0
            while sum(replica.in_round for replica in self._replicas) < length * count:
                self._one_tick(length)
            if self._pending:
                self._merge_all()
            self._done_rounds_steps += length
            self._close()
            last = number == len(self._lengths)
            if last or self._is_due(length) == set(range(count)):
                self._merge_all()
            if not last:
                self.evaluator.maybe(self._done_rounds_steps, self._bytes, self._anchor_N, self._report)
        loss = self.evaluator.finish(self._done_rounds_steps, self._bytes, self._anchor_N())
        return Outcomes(
            steps=self._steps, tokens=self.evaluator.tokens(self._steps), loss=loss,
            ema_loss=self.evaluator.whole(self._ema_N), worst_jump=self.evaluator.worst_jump,
            bytes_sent=self._bytes, all_reduce_bytes=self.evaluator.all_reduce_bytes(self._steps, method.island),
            blob_bytes=self._blob_bytes // max(1, len(self._lengths) * count), rounds=len(self._lengths),
            curve=tuple(self.evaluator.curve), seconds=0.0,
        )  # fmt: skip

    def _one_tick(self, length: int) -> None:
        for replica in self._replicas:
            replica.credit += replica.speed
            if replica.credit >= 1.0:
                replica.credit -= 1.0
                fraction = min(1.0, (replica.in_round + 1) / length)
                position = (self._done_rounds_steps + fraction * length) / self._steps
                replica.step(schedule(position, warmup=self._manifest.inner.warmup))
        self._tick += 1
        for index in sorted(self._is_due(length)):
            self._merge(index)

    def _is_due(self, length: int) -> set[int]:
        pending = self._pending
        if pending is None:
            return set()
        return {
            index
            for index in pending.waiting
            if self._replicas[index].arrival < 1.0
            and self._tick - pending.closed_at >= round(self._replicas[index].arrival * length)
        }

    def _close(self) -> None:
        offers = [
            replica.loop.offer(replica.stage.model.flat_N.clone(), replica.in_round) for replica in self._replicas
        ]
        blobs: tuple[Blob, ...] = tuple(offer.blob for offer in offers)
        self._blob_bytes += sum(map(len, blobs))
        sizes = [len(blob) for blob in blobs]
        everybody = frozenset(range(len(self._replicas)))
        weights = tuple(offer.micro_batches for offer in offers)
        momenta: tuple[tuple[list[Tensor], list[Tensor]], ...] = ()
        if self._method.momentum_codec:
            momenta, momentum_sizes = self._shared_momenta()
            sizes = [size + more for size, more in zip(sizes, momentum_sizes, strict=True)]
        if self._owner:
            blobs, weights = (self._owner.blob(blobs, weights),), (sum(weights),)
            # A peer sends each other owner that one's part (its deputy too, where there are two); who owns a part, and who is
            # its deputy, has the mean of it, the others take it.
            copies, result = self._method.copies, len(blobs[0])
            others, takers = self._count - 1, self._count - copies
            sizes = [(copies * size + result * takers // others) // self._count for size in sizes]
        self._bytes += bytes_of_round(sizes)
        self._pending = Pending(self._round, blobs, weights, self._tick, everybody, momenta)

    def _shared_momenta(self) -> tuple[tuple[tuple[list[Tensor], list[Tensor]], ...], list[int]]:
        """Of each replica its momenta now and the mean of all as decoded; and how many bytes each sends."""
        codec = codec_named(self._method.momentum_codec)
        kept = [[each.clone() for each in replica.momenta()] for replica in self._replicas]
        means, sizes = [torch.zeros_like(each) for each in kept[0]], [0] * len(kept)
        for index, of_replica in enumerate(kept):
            for momentum_XRC, mean_XRC in zip(of_replica, means, strict=True):
                payload, decoded_XRC = codec.encode(momentum_XRC), torch.empty_like(momentum_XRC)
                codec.decode(memoryview(payload), decoded_XRC)
                mean_XRC.add_(decoded_XRC, alpha=1 / len(kept))
                sizes[index] += len(payload)
        return tuple((of_replica, means) for of_replica in kept), sizes

    def _merge(self, index: int) -> None:
        pending, replica = self._pending, self._replicas[index]
        assert pending is not None
        _, shift_N = replica.loop.merge(
            pending.blobs, pending.weights, own=True, round_number=pending.round, head=replica.loop.state.head
        )
        replica.stage.model.flat_N.add_(shift_N)
        if pending.momenta:  # what came since the close stays
            fade = self._manifest.inner.momentum ** (self._tick - pending.closed_at)
            for momentum_XRC, was_XRC, mean_XRC in zip(replica.momenta(), *pending.momenta[index], strict=True):
                momentum_XRC.add_(mean_XRC - was_XRC, alpha=fade)
        waiting = pending.waiting - {index}
        self._pending = dataclasses.replace(pending, waiting=waiting) if waiting else None
        if not waiting:
            digests = {each.loop.state.digest for each in self._replicas}
            assert len(digests) == 1, f"{len(digests)} different anchors after round {pending.round}"
            self._ema_N.mul_(EMA_DECAY).add_(self._anchor_N(), alpha=1 - EMA_DECAY)

    def _merge_all(self) -> None:
        for index in sorted(self._pending.waiting if self._pending else ()):
            self._merge(index)

    def _anchor_N(self) -> Tensor:
        return self._replicas[0].loop.state.anchor_N()

    def _policy(self, manifest: Manifest, codec: str) -> CodecPolicy:
        method = self._method

        def named(name: str) -> CodecPolicy:
            if name.startswith("topk:"):
                sparser, vector_codec = SparserTopK(int(name.split(":")[1])), codec_named(VECTOR_CODEC)
                return lambda spec: sparser if len(spec.shape) > 1 else vector_codec
            return policy_named(name, rank=method.rank)

        if "=" in codec:
            pairs = [part.split("=") for part in codec.split()]
            patterns = [(pattern, named(name)) for pattern, name in pairs]
        else:
            patterns = [("*", named(codec))]
        skipped, every = method.skip
        skip = SkipCodec()

        def codec_of(spec: TensorSpec) -> TensorCodec:
            is_matrix = min(matrix_shape(spec.shape)) > 1 and len(spec.shape) > 1
            if every > 1 and is_matrix and fnmatch.fnmatch(spec.name, skipped) and self._round % every:
                return skip
            return next(policy for pattern, policy in patterns if fnmatch.fnmatch(spec.name, pattern))(spec)

        return codec_of

    def _warm_up(self) -> None:
        """The same synchronous steps for all replicas; each takes a copy of the parameters and the moments."""
        stage, optimizer = _train_synchronously(self._study, self._method, self._method.warm_steps, self._steps)
        for replica in self._replicas:
            replica.stage.model.flat_N.copy_(stage.model.flat_N)
            replica.draws = self._method.warm_steps
            _copy_moments(optimizer, replica.optimizer)
            start = AnchorState.of(
                replica.loop.state.layout, head=replica.loop.state.head, round_number=0,
                anchor=memoryview(stage.model.flat_N.clone().numpy().data).cast("B"), momentum=replica.loop.state.momentum,
            )  # fmt: skip
            replica.loop.install(start, keep_pseudo_gradient=False)
        self._ema_N = self._anchor_N()


class Evaluator:
    """Validation loss of parameter vectors: ten times a part of the split, at the end all of it."""

    def __init__(self, study: Study, manifest: Manifest, steps: int) -> None:
        self._study, self._steps = study, steps
        self._stage = build_stage(manifest)
        self._context = manifest.model.context
        self._tokens_a_step = manifest.inner.micro_batch * self._context * study.num_replicas
        self._next = steps / CURVE_POINTS
        self.curve: list[tuple[int, int, float]] = []
        self.worst_jump = 0.0

    def tokens(self, steps: int) -> int:
        return steps * self._tokens_a_step

    def all_reduce_bytes(self, steps: int, island: int = 1) -> int:
        count = self._study.num_replicas // island
        return 2 * (count - 1) * 4 * self._stage.model.layout.num_elements * steps // count

    def maybe(self, steps: int, bytes_sent: int, flat_N: Callable[[], Tensor], report: Callable[[str], None]) -> None:
        """A point of the curve, when it is time for one."""
        if steps < self._next:
            return
        while self._next <= steps:
            self._next += self._steps / CURVE_POINTS
        self._point(steps, bytes_sent, self._loss(flat_N(), CURVE_BYTES))
        report(f"{steps:6} steps  {self.curve[-1][2]:.4f}")

    def finish(self, steps: int, bytes_sent: int, flat_N: Tensor) -> float:
        self._point(steps, bytes_sent, self._loss(flat_N, CURVE_BYTES))
        return self.whole(flat_N)

    def whole(self, flat_N: Tensor) -> float:
        return self._loss(flat_N, self._study.corpus.validation_tokens)

    def _point(self, steps: int, bytes_sent: int, loss: float) -> None:
        if self.curve:
            self.worst_jump = max(self.worst_jump, loss - self.curve[-1][2])
        self.curve.append((self.tokens(steps), bytes_sent, round(loss, 5)))

    def _loss(self, flat_N: Tensor, limit: int) -> float:
        self._stage.model.flat_N.copy_(flat_N)
        batches = self._study.corpus.validation_batches(limit, batch=32, context=self._context)
        return self._stage.evaluate(batches)[0]


def peer_name(index: int) -> PeerId:
    return PeerId(f"{index:052d}")  # as long as a real one


def batch_of(study: Study, peers: Sequence[PeerId], index: int, batch: int, context: int) -> tuple[Tensor, Tensor]:
    """Draw `index` of each of the peers, one after the other."""
    parts = [
        study.corpus.train_batch(
            seed=study.seed, peer=peer, incarnation=1, round_number=0, index=index, batch=batch, context=context
        )
        for peer in peers
    ]
    return torch.cat([inputs for inputs, _ in parts]), torch.cat([targets for _, targets in parts])


def bytes_of_round(blob_sizes: Sequence[int], *, inner_steps: int = 32) -> int:
    """What a peer sends in a round, on average over the peers: its blob to each of the others, frames around it, and the
    messages of a round without loss: offers and heartbeats to all, the leader's proposal and certificate, the votes."""
    count = len(blob_sizes)
    digest, signature = Digest(bytes(32)), bytes(64)
    peers = tuple(peer_name(index) for index in range(count))
    entries = tuple(Entry(peer, 1 << 41, digest, 100_000, inner_steps, digest) for peer in peers)
    value = Value("round", 1000, 1000, 4000, entries, peers, Plan("lowrank-int4", 64, inner_steps), digest)
    certificate = Certificate(0, digest, 0, 1000, value, tuple((peer, signature) for peer in peers))
    place = (0, digest, 0)
    offer = Offer(*place, entries[0], signature)
    beat = Heartbeat(*place, 1 << 41, 1000, 1000, 4000, 1001, inner_steps, True, digest)
    of_leader: list[Message] = [
        Propose(*place, 0, value, signature, (), (signature,) * count),
        Cert(*place, certificate),
    ]
    ack = Ack(*place, 1000, digest, signature)

    def framed(size_bytes: int) -> int:
        return size_bytes + FRAME_BYTES * -(-size_bytes // 65536)

    others = count - 1
    sent = others * framed(len(encode_message(offer))) + HEARTBEATS * others * framed(len(encode_message(beat)))
    sent += sum(others * framed(len(encode_message(each))) for each in of_leader) // count
    sent += others * framed(len(encode_message(ack))) // count
    sent += others * framed(48)  # requests for the others' blobs
    return sent + others * sum(map(framed, blob_sizes)) // count


def _round_lengths(method: Method, steps: int) -> Iterator[int]:
    """Inner steps of each round; the last round ends with the last step."""
    done = 0
    while done < steps:
        length = next((h for share, h in method.inner_steps_until if done < share * steps), method.inner_steps)
        length = min(length, steps - done)
        yield length
        done += length


def _synchronous(study: Study, method: Method, report: Callable[[str], None]) -> Outcomes:
    steps = study.steps(method)
    evaluator = Evaluator(study, study.manifest(method), steps)

    def each(done: int, flat_N: Tensor) -> None:
        if done < steps:
            evaluator.maybe(done, evaluator.all_reduce_bytes(done), flat_N.clone, report)

    stage, _ = _train_synchronously(study, method, steps, steps, each)
    sent = evaluator.all_reduce_bytes(steps)
    loss = evaluator.finish(steps, sent, stage.model.flat_N)
    return Outcomes(
        steps=steps, tokens=evaluator.tokens(steps), loss=loss, ema_loss=loss, worst_jump=evaluator.worst_jump,
        bytes_sent=sent, all_reduce_bytes=sent, blob_bytes=0, rounds=steps, curve=tuple(evaluator.curve), seconds=0.0,
    )  # fmt: skip


def _train_synchronously(
    study: Study, method: Method, steps: int, total: int, each: Callable[[int, Tensor], None] = lambda _s, _f: None
) -> tuple[Stage, InnerOptimizer]:
    manifest = study.manifest(method)
    stage = build_stage(manifest)
    optimizer = InnerOptimizer(stage.model, manifest.inner)
    peers = [peer_name(index) for index in range(study.num_replicas)]
    for index in range(steps):
        inputs_BT, targets_BT = batch_of(study, peers, index, manifest.inner.micro_batch, manifest.model.context)
        stage.train_micro_batch(inputs_BT, targets_BT)
        optimizer.step(micro_batches=1, share=schedule((index + 1) / total, warmup=manifest.inner.warmup))
        each(index + 1, stage.model.flat_N)
    return stage, optimizer


def _copy_moments(source: InnerOptimizer, target: InnerOptimizer) -> None:
    target.steps_done = source.steps_done
    ours, theirs = target._adamw, source._adamw
    assert isinstance(ours, FusedAdamW), "of moments in float32"
    assert isinstance(theirs, FusedAdamW), "of moments in float32"
    ours._adamw.load_state_dict(copy.deepcopy(theirs._adamw.state_dict()))
    if source._muon is not None and target._muon is not None:
        for here, there in zip(target._muon._batches, source._muon._batches, strict=True):
            here.momentum_XRC.copy_(there.momentum_XRC)
