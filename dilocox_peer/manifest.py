"""The manifest: what all peers of a run must agree on, signed by the run's owner.

Its canonical bytes hash to the run id, so an invitation link that names the run id names every setting. A volunteer
sets none of it. This file holds the schema, the hash and the signature; reading and writing run.toml is config.py.
"""

import json
import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from dilocox_peer.complaints import first_error
from dilocox_peer.errors import ManifestMismatch
from dilocox_peer.signing import PUBLIC_KEY_BYTES, SigningKey, peer_id_of, public_key_of, verify_key
from dilocox_peer.small_files import SmallFile, small_file
from dilocox_peer.types import Digest, PeerId, RunId, canonical, sha256

FORMAT: Final = 1
MAX_MANIFEST_BYTES = 64 * 1024
MAX_MEMBERS = 512  # listed in a manifest, which they are the largest part of

RUN_NAME: Final = r"^[A-Za-z0-9._-]{1,64}$"
BYTES: Final = "bytes"
NUM_BYTES: Final = 256  # tokens of a run of bytes
SHARDS: Final = "shards"

MAX_CONFIG_CHARS = 16 * 1024
MAX_LAYERS = 1024  # lists are made of a link's, before it is known whether there is room for them

# Without ? and #: a file's name is put behind it, and would be no name there.
_WEB_FOLDER = r"""^((https://|http://(localhost|127\.0\.0\.1)[:/])[!"$->@-~]+)?$"""
Packing = Literal["concatenate", "best-fit"]

Positive = Annotated[int, Field(gt=0, lt=2**31)]  # no number here is beyond what a message can carry
Sha256Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunSection(_Section):
    name: str = Field("my-run", pattern=RUN_NAME, description="shown to volunteers; letters, digits, . _ -")
    seed: int = Field(0, ge=0, lt=2**31, description="initial parameters and data order are a function of it")


class ModelSection(_Section):
    """A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU; its parameters start from the run's seed."""

    architecture: Literal["llama"] = Field("llama", description="this project's own Llama; needs torch alone")
    layers: int = Field(2, gt=0, le=MAX_LAYERS, description="transformer blocks")
    hidden_size: Positive = Field(96, description="width of the residual stream")
    heads: Positive = Field(4, description="query heads; hidden_size / heads is the head size and must be even")
    kv_heads: Positive = Field(2, description="key/value heads; divides heads")
    mlp_size: Positive = Field(256, description="width inside the SwiGLU")
    context: Positive = Field(64, description="tokens a sequence")
    vocab_size: int = Field(256, ge=256, le=2**31 - 1, description="256: bytes")
    rope_theta: float = Field(10000.0, gt=0, description="base of the rotary position frequencies")
    norm_eps: float = Field(1e-5, gt=0, description="added to the mean square in RMSNorm")

    @property
    def starts_from_files(self) -> bool:
        """It starts from the run's seed."""
        return False

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.hidden_size % self.heads or (self.hidden_size // self.heads) % 2:
            raise ValueError(f"hidden_size {self.hidden_size} must be heads {self.heads} times an even number")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} must divide heads {self.heads}")
        return self


class PublishedSection(_Section):
    """A decoder as it was published: its layers are those of `transformers`, its parameters start from the published ones.

    `dilocox-peer init --from FOLDER` fills it in. No code is ever taken from a model's folder.
    """

    architecture: Literal["transformers"] = Field("transformers", description="a family of the library transformers")
    source: str = Field(min_length=1, max_length=512, description="folder or hub id it comes from, for people")
    revision: str = Field("", max_length=128, description="of the source, for people; the hashes below are what counts")
    layers: int = Field(gt=0, le=MAX_LAYERS, description="transformer blocks")
    hidden_size: Positive = Field(description="width of what stages send each other")
    context: Positive = Field(description="tokens a sequence; at most the model's own")
    vocab_size: int = Field(ge=1, le=2**31 - 1, description="rows of the embedding")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(description="of the published weights; trained in float32")
    layout: str = Field(pattern=r"^[0-9a-f]{64}$", description="hash of all parameters' names and shapes")
    genesis: tuple[Sha256Hex, ...] = Field(
        strict=False, max_length=256, description="hash of each stage's first state: of its weights, tensor by tensor"
    )
    files: tuple[str, ...] = Field(
        strict=False, max_length=32, description="small files beside the weights: sha256, bytes, name"
    )
    lora_rank: int = Field(
        0,
        ge=0,
        le=1024,
        description="0: all parameters are trained; else adapters of this rank, and they stay as they are",
    )
    lora_alpha: float = Field(16.0, gt=0, le=65536, description="an adapter counts alpha / rank times")
    lora_targets: tuple[str, ...] = Field(
        (), strict=False, max_length=64, description="layers with adapters: the last parts of their names"
    )
    base_dtype: Literal["float32", "bfloat16"] = Field("float32", description="how matrices are kept beside adapters")
    base: tuple[Sha256Hex, ...] = Field(
        (), strict=False, max_length=256, description="hash of each stage's file of weights that stay as they are"
    )
    library: str = Field("", max_length=40, description="transformers of the run's owner, for people")
    canary: tuple[float, ...] = Field(
        (),
        strict=False,
        max_length=1024,
        description="4 numbers of each stage's first weights on fixed inputs; [] asks for none",
    )
    config: str = Field(min_length=2, max_length=MAX_CONFIG_CHARS, description="the model's config.json")

    @property
    def starts_from_files(self) -> bool:
        """Whether the first state is made of published files; adapters start from nothing."""
        return not self.lora_rank

    @model_validator(mode="after")
    def _adapters_fit(self) -> Self:
        if self.lora_rank and (len(self.base) != len(self.genesis) or not self.lora_targets):
            raise ValueError("lora_rank: adapters need lora_targets, and one hash in base for each stage")
        if not self.lora_rank and (self.base or self.lora_targets):
            raise ValueError("lora_rank is 0: lora_targets and base are for adapters")
        if self.canary and len(self.canary) != 4 * len(self.genesis):
            raise ValueError(f"canary has {len(self.canary)} numbers for {len(self.genesis)} stages: 4 a stage")
        for target in self.lora_targets:
            if not re.fullmatch(r"[A-Za-z0-9_]{1,64}", target):
                raise ValueError(f"lora_targets: {target[:80]!r} is no name of a layer")
        return self

    @model_validator(mode="after")
    def _files_fit(self) -> Self:
        names = [small_file(line).name for line in self.files]
        if len(set(names)) != len(names):
            raise ValueError("files: one is listed twice")
        try:
            is_config = isinstance(json.loads(self.config), dict)
        except (ValueError, RecursionError):  # of brackets in brackets
            is_config = False
        if not is_config:
            raise ValueError("config is no JSON object")
        return self

    @property
    def small_files(self) -> tuple[SmallFile, ...]:
        return tuple(small_file(line) for line in self.files)


def _architecture_of(section: Any) -> str:
    if isinstance(section, dict):
        return str(section.get("architecture", "llama"))
    return str(getattr(section, "architecture", "llama"))


AnyModelSection = Annotated[
    Annotated[ModelSection, Tag("llama")] | Annotated[PublishedSection, Tag("transformers")],
    Discriminator(
        _architecture_of,
        custom_error_type="architecture",
        custom_error_message='architecture must be "llama" or "transformers"',
    ),
]


class StagesSection(_Section):
    """How the model is cut, and how micro-batches pass from stage to stage."""

    count: Positive = Field(1, le=256, description="pipeline stages; each peer holds one")
    blocks: tuple[Positive, ...] = Field(
        (), strict=False, description="transformer blocks of each stage, first to last; [] cuts by compute"
    )
    schedule: Literal["carry", "flush"] = Field(
        "carry",
        description="carry: forwards go on while a step is due, with two weight versions; flush: drain before each step",
    )
    activations: Literal["int8", "bf16", "fp32"] = Field(
        "int8",
        description="form of what stages send each other; int8: 8 bits, the largest channels apart in bf16, the rest in blocks",
    )


class InnerSection(_Section):
    """The optimizer of the local steps."""

    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="adamw, or muon: Muon on hidden matrices and AdamW on the rest, at one learning rate"
    )
    learning_rate: float = Field(4e-3, gt=0, description="peak; linear warm-up, then as the schedule says")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW second moment")
    momentum: float = Field(0.95, ge=0, lt=1, description="of Muon (Nesterov); adamw does not use it")
    moments: Literal["float32", "bfloat16"] = Field("float32", description="bfloat16: half of it")
    weight_decay: float = Field(0.1, ge=0, description="decoupled")
    clip_norm: float = Field(1.0, gt=0, description="gradient norm per stage and step")
    warmup: Fraction = Field(0.03, description="share of the run")
    schedule: Literal["linear", "cosine", "wsd"] = Field(
        "linear",
        description="after the warm-up: linear or cosine down to floor, or wsd: stays, and falls in the last part",
    )
    floor: Fraction = Field(0.0, description="share of the peak at the end of the run, and after it")
    decay: Fraction = Field(0.2, description="of wsd: the last part of the run, in which it falls as 1 - sqrt")
    tokens: int = Field(0, ge=0, le=2**60, description="of all peers, that the schedule runs over; 0: the run's steps")
    micro_batch: Positive = Field(8, description="sequences a micro-batch")
    accumulate: Positive = Field(1, description="micro-batches an inner step (K)")
    first_accumulate: int = Field(
        0, ge=0, lt=2**31, description="batch ramp: K at the start, growing to accumulate with the run; 0: none"
    )
    batch_ramp: Fraction = Field(0.1, description="share of the run in which K grows, if first_accumulate is given")

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.schedule == "wsd" and self.warmup + self.decay > 1.0:
            raise ValueError(f"warmup {self.warmup} and decay {self.decay} are more than the run")
        if self.first_accumulate > self.accumulate:
            raise ValueError(f"first_accumulate {self.first_accumulate} is more than accumulate {self.accumulate}")
        return self


class OuterSection(_Section):
    """Nesterov on the averaged pseudo-gradients (DiLoCo, arXiv 2311.08105)."""

    learning_rate: float = Field(0.7, gt=0, description="outer step size")
    momentum: float = Field(0.6, ge=0, lt=1, description="outer Nesterov momentum")
    overlap: Literal["arrival", "one-step", "none"] = Field(
        "arrival",
        description="arrival: merge as soon as the round is certified; one-step: a full round late; none: wait",
    )


class RoundsSection(_Section):
    total: Positive = Field(
        32,
        description="outer rounds of the run, at inner_steps each: the inner steps stay when rounds change their length",
    )
    inner_steps: Positive = Field(
        32, description="inner steps a peer and round, on average (H); the first, if it adapts"
    )
    min_inner_steps: Positive = Field(8, description="H where it adapts: at least, if inner_steps is not less")
    max_inner_steps: Positive = Field(256, description="and at most, if inner_steps is not more")
    first_inner_steps: int = Field(
        0, ge=0, lt=2**31, description="warm-up: H of the first rounds, doubling at 3, 6, 12 ... % of the run; 0: none"
    )
    start_peers: int = Field(1, ge=1, le=64, description="peers a stage waits for before its first round")
    averaging: Literal["all-to-all", "slices"] = Field(
        "all-to-all",
        description="all-to-all: everybody fetches every contribution; slices: each peer averages its slices, from four peers on",
    )
    slices: int = Field(
        16, ge=4, le=64, description="of averaging in slices: how many; a peer averages two of n of them"
    )
    checkpoint_every: Positive = Field(
        8,
        description="outer rounds between two checkpoints that the owner's key signs; nobody goes back further without one",
    )

    @property
    def num_slices(self) -> int:
        """In which contributions are averaged; 0: all to all."""
        return self.slices if self.averaging == "slices" else 0


class CompressionSection(_Section):
    codec: Literal["none", "fp16", "int8", "int4", "int2", "sign", "topk", "lowrank-int4"] = Field(
        "fp16",
        description="of contributions: none (fp32), fp16, int8, int4, int2, sign (1 bit), topk (8 %) or lowrank-int4",
    )
    rank: int = Field(64, ge=1, le=4096, description="of lowrank-int4; matrices too small for it are sent as int2")
    adapt: Literal["link", "rank", "off"] = Field(
        "link",
        description="link: codec, rank and H by the link; rank: rank from the spectrum, H with it; off: as they are",
    )
    exchange_share: float = Field(
        0.7, gt=0, le=1, description="link: of a round, that an exchange may take; training goes on meanwhile"
    )
    residual: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="bfloat16: half of it",
    )
    times_fewer: float = Field(
        200.0,
        ge=0,
        description="link: at least so many times fewer bytes than AllReduce of fp32 gradients; 0: no bound",
    )


class DataSection(_Section):
    source: str = Field(
        "stdlib",
        min_length=1,
        max_length=256,
        description="stdlib (the source of Python's own library), files (each peer gives its own with --data) or shards",
    )
    validation: float = Field(
        0.05, gt=0, lt=0.5, description="share of the documents, chosen by hash, never trained on"
    )
    catalogue: str = Field(
        "",
        pattern=r"^([0-9a-f]{64})?$",
        description="of shards: the sha256 of their catalogue (`init --data` writes it)",
    )
    packing: Packing = Field(
        "concatenate", description="of shards; best-fit: a document in one sequence, sees no other"
    )
    url: str = Field(
        "", max_length=512, pattern=_WEB_FOLDER, description="of shards: a web server's folder of them; empty: none"
    )
    tokenizer: str = Field(
        BYTES,
        pattern=r"^(bytes|[0-9a-f]{64})$",
        description="bytes, or the sha256 of a tokenizer.json (`init --tokenizer` writes it)",
    )
    bos: str = Field("", max_length=128, description="its token before each document; empty: none")
    eos: str = Field("", max_length=128, description="its token behind each document; empty: none")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.tokenizer == BYTES and (self.bos or self.eos):
            raise ValueError("bos and eos are tokens of a tokenizer.json: bytes have none")
        if bool(self.catalogue) != (self.source == SHARDS):
            raise ValueError('catalogue is for source "shards", which needs one')
        if self.url and self.source != SHARDS:
            raise ValueError('url is for source "shards"')
        if self.packing != "concatenate" and self.source != SHARDS:
            raise ValueError('packing is for source "shards"')
        return self


class LimitsSection(_Section):
    max_peers: int = Field(64, ge=1, le=64, description="peers of one stage that average together")
    norm_clip: float = Field(4.0, gt=1, description="a contribution's norm against the group's median, at most")


class AdmissionSection(_Section):
    """Admission. What the modes do is in admission.py."""

    mode: Literal["open", "invite", "list"] = Field(
        "open",
        description="open: everybody; invite: whom the owner invites (`dilocox-peer invite`); list: the members, and whom the owner invites",
    )
    members: tuple[str, ...] = Field(
        (),
        strict=False,
        max_length=MAX_MEMBERS,
        description="of mode list: PeerIDs; `join` names its own when it is not listed",
    )
    votes_after: int = Field(
        4,
        ge=0,
        le=1000,
        description="of mode open: contributions of a newcomer's that count before it votes; 0: it votes at once",
    )
    votes_after_hours: float = Field(
        24.0,
        ge=0,
        le=10_000,
        description="and hours of the run's work since the first of them, where four others vote already",
    )

    @model_validator(mode="after")
    def _members_fit(self) -> Self:
        if bool(self.members) != (self.mode == "list"):
            raise ValueError('members are for mode "list", which needs some')
        if len(set(self.members)) != len(self.members):
            raise ValueError("members: one is listed twice")
        for member in self.members:
            try:
                public_key_of(PeerId(member))
            except ValueError:
                raise ValueError(f"members: {member[:80]!r} is no Ed25519 PeerID (12D3KooW...)") from None
        return self


class OwnerSection(_Section):
    public_key: str = Field("", pattern=r"^([0-9a-f]{64})?$", description="Ed25519, hex")
    signature: str = Field(
        "", pattern=r"^([0-9a-f]{128})?$", description="of everything above; `dilocox-peer sign` renews it"
    )


class Manifest(_Section):
    """All settings of a run. Two manifests with equal `run_id` are equal."""

    format: Literal[1] = FORMAT
    run: RunSection = RunSection()
    model: AnyModelSection = ModelSection()
    stages: StagesSection = StagesSection()
    inner: InnerSection = InnerSection()
    outer: OuterSection = OuterSection()
    rounds: RoundsSection = RoundsSection()
    compression: CompressionSection = CompressionSection()
    data: DataSection = DataSection()
    limits: LimitsSection = LimitsSection()
    admission: AdmissionSection = AdmissionSection()
    owner: OwnerSection = OwnerSection()

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        stages, layers = self.stages, self.model.layers
        if stages.count > layers:
            raise ValueError(f"stages.count {stages.count} exceeds model.layers {layers}")
        if self.rounds.first_inner_steps > self.rounds.inner_steps:
            raise ValueError(
                f"rounds.first_inner_steps {self.rounds.first_inner_steps} exceeds rounds.inner_steps {self.rounds.inner_steps}"
            )
        if stages.blocks and (len(stages.blocks) != stages.count or sum(stages.blocks) != layers):
            raise ValueError(f"stages.blocks {list(stages.blocks)} must be {stages.count} numbers that sum to {layers}")
        if self.rounds.num_slices and (self.compression.adapt == "rank" or self.compression.codec == "lowrank-int4"):
            raise ValueError(
                'rounds.averaging "slices" needs compression.adapt "link" or "off", and another codec than lowrank-int4'
            )
        if isinstance(self.model, PublishedSection):
            if not stages.blocks:
                raise ValueError("stages.blocks: a published model's cut is written out, as its hashes belong to it")
            if len(self.model.genesis) != stages.count:
                raise ValueError(f"model.genesis has {len(self.model.genesis)} hashes for {stages.count} stages")
        return self

    def signed_bytes(self) -> bytes:
        """What the owner signs and the run id hashes: every field but the signature, in schema order; of fields newer than the first
        runs those that are not at their default, so that these runs stay what they are."""
        return canonical(
            ["dilocox-manifest", *_pairs(self.model_dump(exclude={"owner": {"signature"}, **self._unused}))]
        )

    @property
    def _unused(self) -> dict[str, Any]:
        return {} if self.rounds.num_slices else {"rounds": {"averaging", "slices"}}

    @property
    def digest(self) -> Digest:
        return sha256(self.signed_bytes())

    @property
    def run_id(self) -> RunId:
        return RunId(self.digest.hex())

    def genesis(self, stage: int) -> Digest:
        """Head of a stage's chain before its first round: a hash of manifest and stage."""
        return sha256(canonical(["dilocox-genesis", self.digest, stage]))

    @property
    def owner_peer(self) -> PeerId | None:
        """The owner's key as a PeerID; None of a manifest that nobody has signed."""
        public_key = bytes.fromhex(self.owner.public_key)
        return peer_id_of(public_key) if len(public_key) == PUBLIC_KEY_BYTES else None

    def signed_by(self, key: SigningKey) -> "Manifest":
        """This manifest with key's owner and signature."""
        owned = self.model_copy(update={"owner": OwnerSection(public_key=key.public_key.hex())})
        signature = key.sign(owned.signed_bytes()).hex()
        return owned.model_copy(update={"owner": OwnerSection(public_key=key.public_key.hex(), signature=signature)})

    @property
    def is_signed(self) -> bool:
        public_key = bytes.fromhex(self.owner.public_key)
        if len(public_key) != PUBLIC_KEY_BYTES:
            return False
        return verify_key(public_key, self.signed_bytes(), bytes.fromhex(self.owner.signature))

    def to_bytes(self) -> bytes:
        """The wire form (JSON, UTF-8)."""
        return self.model_dump_json(exclude=self._unused).encode()

    @classmethod
    def from_bytes(cls, raw: bytes, *, run_id: RunId) -> "Manifest":
        """The manifest in raw if it is well formed, hashes to run_id and carries its owner's signature.

        Raises ManifestMismatch; raw comes from a stranger.
        """
        if len(raw) > MAX_MANIFEST_BYTES:
            raise ManifestMismatch(f"manifest of {len(raw)} bytes; at most {MAX_MANIFEST_BYTES} are read")
        try:
            manifest = cls.model_validate_json(raw)
            found = manifest.run_id
        except ValidationError as error:
            raise ManifestMismatch(
                f"the manifest has {first_error(error)}: this peer and the run are of different versions, or it was tampered with"
            ) from None
        if found != run_id:
            raise ManifestMismatch(
                f"the manifest received is of run {found[:12]}, the link names {run_id[:12]}: ask for a new link"
            )
        if not manifest.is_signed:
            raise ManifestMismatch(
                f"the manifest of run {run_id[:12]} does not carry its owner's signature: do not join it"
            )
        return manifest


def _pairs(section: dict[str, Any]) -> list[list[Any]]:
    return [[key, _pairs(value) if isinstance(value, dict) else value] for key, value in section.items()]
