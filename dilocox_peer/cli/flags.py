"""The flags of every command, each declared once: a field's name, type, default and help are the option's, and the command reads
the field. Light, as `--help` loads all of it. How a field becomes an option: command.py.

A field is called like its option, units and all; where Python has no such name, `name` says the option's.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from dilocox_peer.cli.home import PeerHome
from dilocox_peer.flags import Flag, Positional, num_threads
from dilocox_peer.peer.settings import (
    ANY_PORT,
    AnnouncedAddresses,
    AtMost,
    Choices,
    Column,
    ListenAddresses,
    OnBattery,
    RelayBudget,
    TokenizerPath,
)


class LogFormat(StrEnum):
    """auto: lines for people; json: one event a line, for programs."""

    AUTO = "auto"
    JSON = "json"

    @property
    def is_json(self) -> bool:
        return self is LogFormat.JSON


class AdmissionMode(StrEnum):
    """Values of the manifest's admission section."""

    OPEN = "open"
    INVITE = "invite"
    LIST = "list"


class DataPacking(StrEnum):
    """Values of the manifest's data section."""

    CONCATENATE = "concatenate"
    BEST_FIT = "best-fit"


class WeightType(StrEnum):
    """Of exported weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class BaseType(StrEnum):
    """Of weights beside adapters."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


SPEEDS = 0.01, 100_000  # of a replay
RunFile = Annotated[Path, Positional("The run's signed run.toml.", metavar="RUN_FILE")]
Name = Annotated[str, Flag("Names this peer on this machine: its key and state live in a folder of that name.")]
Home = Annotated[Path | None, Flag("Folder for keys and state.", shown="$XDG_DATA_HOME/dilocox-peer")]
IdentityPath = Annotated[Path | None, Flag("Key file; made if missing.", shown="in the peer's folder")]
OwnerKey = Annotated[Path | None, Flag("The key that signed it.", shown="owner.key in --home")]
Log = Annotated[LogFormat, Flag("auto: lines for people; json: an event a line.")]
UntilStdinCloses = Annotated[bool, Flag("Leave when standard input ends (for supervisors).", hidden=True)]
BasePath = Annotated[
    Path | None,
    Flag(
        "Of a run of adapters (LoRA): folder of the published model beside them.", shown="where the run's owner had it"
    ),
]
Device = Annotated[str, Flag("cpu, cuda, cuda:N, xpu or mps; auto: the best here.")]


class OfPeer:
    """Flags that name a peer of this machine: what they have in common, and where it lives."""

    name: str
    home: Path | None
    identity_path: Path | None = None  # of commands that need no key

    @property
    def peer_home(self) -> PeerHome:
        """Raises ConfigError for a name that is no folder name."""
        return PeerHome.at(self.home, self.name, self.identity_path)


# ---- of a run's owner ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class InitFlags:
    path: Annotated[Path, Positional("File to write.")] = Path("run.toml")
    preset: Annotated[
        str | None,
        Flag(
            "tiny, small, 125m or 1.3b; with --from smollm2-135m, qwen3-0.6b, llama3-1b or llama3-8b-lora.",
            shown="tiny",
        ),
    ] = None
    published: Annotated[
        Path | None, Flag("Go on from this folder of a published model, or of an export.", name="from", shown=False)
    ] = None
    revision: Annotated[str, Flag("Of that model, for people.", shown=False)] = ""
    context: Annotated[
        int | None, Flag("Tokens a sequence, with --from.", shown="1024, or less if the model has less", least=2)
    ] = None
    lora_rank: Annotated[
        int | None,
        Flag("Train adapters of this rank (LoRA), with --from; its weights stay.", shown=False, least=1, most=1024),
    ] = None
    lora_alpha: Annotated[float | None, Flag("They count alpha / rank times.", shown="twice the rank")] = None
    lora_targets: Annotated[
        tuple[str, ...], Flag("Layers with adapters, e.g. q_proj; may repeat.", shown="all linear ones")
    ] = ()
    base_dtype: Annotated[
        BaseType | None,
        Flag("How the other weights are kept beside them.", shown="bfloat16 if the source's is, else float32"),
    ] = None
    stages: Annotated[int | None, Flag("Pipeline stages.", shown="the preset's", least=1)] = None
    slices: Annotated[
        bool, Flag("Average in slices, from four peers a stage on: each sends two contributions and a result a round.")
    ] = False
    run_name: Annotated[str | None, Flag("Shown to volunteers.", shown="the preset")] = None
    tokenizer: Annotated[
        Path | None, Flag("A tokenizer.json, or the folder of a model, that cuts the run's text.", shown="bytes")
    ] = None
    data: Annotated[
        Path | None, Flag("Train on the shards of this folder, which `tokenize` wrote.", shown="as the preset says")
    ] = None
    packing: Annotated[
        DataPacking | None,
        Flag(
            "concatenate, or best-fit: a document in one sequence, seeing no other; with --data.", shown="concatenate"
        ),
    ] = None
    data_url: Annotated[
        str, Flag("Folder on a web server with the same shards, for what no peer has.", shown=False)
    ] = ""
    admission: Annotated[
        AdmissionMode, Flag("open: everybody may join; invite: whom you invite; list: edit the file.")
    ] = AdmissionMode.OPEN
    owner_key: Annotated[Path | None, Flag("The owner's key; made if missing.", shown="owner.key in --home")] = None
    home: Home = None
    force: Annotated[bool, Flag("Overwrite the file.", has_opposite=True)] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeFlags:
    paths: Annotated[
        tuple[Path, ...],
        Positional("Text, .jsonl, .jsonl.gz, .jsonl.zst, .parquet, .arrow; or folders.", metavar="FILES"),
    ]
    out: Annotated[Path, Flag("Folder for the shards and their catalogue.")] = Path("shards")
    tokenizer: Annotated[Path | None, Flag("A tokenizer.json, or the folder of a model.", shown="bytes")] = None
    column: Column = "text"
    mix: Annotated[
        tuple[str, ...],
        Flag(
            "FILE=TIMES: how often an epoch goes over one of FILES: 2, or 0.25: a quarter of it; may repeat.",
            shown=False,
        ),
    ] = ()
    chat: Annotated[
        bool,
        Flag(
            "Conversations, in `messages`: written out by the tokenizer's chat template; answers alone are trained on."
        ),
    ] = False
    validation: Annotated[
        float, Flag("Share of the documents, chosen by hash, never trained on.", least=0.0001, most=0.5)
    ] = 0.01
    shard_tokens: Annotated[int, Flag("Tokens a file.", least=1024, most=2**30)] = 8 << 20
    processes: Annotated[int | None, Flag("That cut text into tokens.", shown="one a core", least=1, most=256)] = None
    force: Annotated[bool, Flag("Replace what is in the folder.", has_opposite=True)] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SignFlags:
    path: Annotated[Path, Positional("The run.toml to sign.")] = Path("run.toml")
    owner_key: Annotated[Path | None, Flag("The owner's key.", shown="owner.key in --home")] = None
    home: Home = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapFlags(OfPeer):
    """port and addresses: of the first run."""

    paths: Annotated[
        tuple[Path, ...], Positional("Signed run.toml of each run.", shown="run.toml", metavar="RUN_FILES")
    ] = (Path("run.toml"),)
    port: Annotated[
        int | None,
        Flag("TCP port on all interfaces, further runs the next ones; 0: any.", shown="4711", least=0, most=65535),
    ] = None
    host_maddrs: ListenAddresses = ()
    announce_maddrs: AnnouncedAddresses = ()
    initial_peers: Annotated[
        tuple[str, ...], Flag("Multiaddrs of other bootstraps or peers of the run.", shown=False)
    ] = ()
    health: Annotated[bool, Flag("Say in one line how the one that runs does; exit code 0 or 1.")] = False
    owner_key: Annotated[
        Path | None,
        Flag(
            "The owner's key: signs first rosters and checkpoints, and redeems invitations.",
            shown="owner.key, in --home or beside the state",
        ),
    ] = None
    web_port: Annotated[
        int | None, Flag("Serve a page of the run there, for a browser; 0: any.", shown="off", least=0, most=65535)
    ] = None
    web_host: Annotated[str, Flag("Address of the page; if not loopback, others can see it.")] = "127.0.0.1"
    keep: Annotated[
        bool, Flag("Keep each run's newest states for who comes when everybody has left.", has_opposite=True)
    ] = True
    evaluate: Annotated[
        bool, Flag("Evaluate what is kept on the validation split, in a process of its own.", has_opposite=True)
    ] = True
    relay: RelayBudget = "100"
    keep_disk: Annotated[float, Flag("GB to keep of each run; two of its states need room.", least=0.001)] = 20.0
    name: Name = "bootstrap"
    home: Home = None
    identity_path: IdentityPath = None
    log: Log = LogFormat.AUTO
    until_stdin_closes: UntilStdinCloses = False


# ---- of a peer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinFlags(OfPeer):
    link: Annotated[str, Positional("The dilocox:// link that `bootstrap` printed.", variable="DILOCOX_LINK")]
    name: Name = "default"
    choices: Choices
    plain: Annotated[bool, Flag("Plain lines in a terminal too, no dashboard.")] = False
    detach: Annotated[bool, Flag("Go on in the background, once it is up.", has_opposite=True)] = False
    log_file: Annotated[Path | None, Flag("Append every event to this JSONL file as well.", shown=False)] = None
    log_file_size: Annotated[float, Flag("MB after which it is rotated.", least=0.001, most=1e6)] = 10.0
    log_file_count: Annotated[int, Flag("Rotated files to keep.", least=0, most=1000)] = 5
    log_to: Annotated[
        tuple[str, ...], Flag("Figures to tensorboard:FOLDER, wandb:PROJECT or trackio:PROJECT.", shown=False)
    ] = ()
    metrics_port: Annotated[int | None, Flag("Serve Prometheus metrics there.", shown="off", least=1, most=65535)] = (
        None
    )
    metrics_host: Annotated[str, Flag("Address of the metrics; if not loopback, others can read them.")] = "127.0.0.1"
    nice: Annotated[int, Flag("Give way to other programs; 19: to all.", least=0, most=19)] = 0
    at_most: AtMost
    hours: Annotated[
        str | None,
        Flag(
            "Train only then, local time, e.g. 22:00-07:00, or mon-fri 22:00-07:00, sat-sun 00:00-24:00.", shown=False
        ),
    ] = None
    only_idle: Annotated[bool, Flag("Train only while other programs leave the processor alone.")] = False
    on_battery: Annotated[OnBattery, Flag("pause: not while the machine runs on its battery; go: then too.")] = (
        OnBattery.PAUSE
    )
    home: Home = None
    identity_path: IdentityPath = None
    log: Log = LogFormat.AUTO
    until_stdin_closes: UntilStdinCloses = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFlags(OfPeer):
    """Flags of the commands to a peer of this machine that need nothing but its name."""

    name: Name = "default"
    home: Home = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseFlags(OfPeer):
    duration: Annotated[
        str | None, Flag("And go on by itself after so long: 90m, 2h, 1d.", name="for", metavar="TIME", shown=False)
    ] = None
    name: Name = "default"
    home: Home = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveFlags(OfPeer):
    finish: Annotated[bool, Flag("Not before what it has trained so far counts in a round.")] = False
    name: Name = "default"
    home: Home = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFlags(OfPeer):
    what: Annotated[str, Positional("install, uninstall or show.", metavar="WHAT")]
    link: Annotated[str | None, Positional("The dilocox:// link to join.", shown=False, variable="DILOCOX_LINK")] = None
    start: Annotated[bool, Flag("Start it now, and with every session.", has_opposite=True)] = True
    name: Name = "default"
    home: Home = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverFlags(OfPeer):
    tip: Annotated[str | None, Positional("Of the branch to go back to; without it: what is kept.", shown=False)] = None
    run: Annotated[str, Flag("Beginning of the run's id, of a peer of several runs.")] = ""
    owner_key: Annotated[
        Path | None, Flag("Sign for that branch, so that the others follow.", shown="owner.key in --home, if there")
    ] = None
    name: Name = "default"
    home: Home = None
    identity_path: IdentityPath = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusFlags(OfPeer):
    link: Annotated[
        str | None, Positional("The run's link: who holds what; without it: the peer on this machine.", shown=False)
    ] = None
    name: Name = "default"
    as_json: Annotated[bool, Flag("One JSON object.", name="json")] = False
    watch: Annotated[bool, Flag("Again and again, until Ctrl-C.")] = False
    home: Home = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFlags:
    path: Annotated[Path, Positional("A JSONL file that `join --log-file` wrote.")]
    speed: Annotated[float, Flag("Times as fast as it happened.", least=SPEEDS[0], most=SPEEDS[1])] = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFlags(OfPeer):
    link: Annotated[str | None, Positional("The run's link; without it only this machine is checked.", shown=False)] = (
        None
    )
    name: Name = "default"
    device: Device = "cpu"
    threads: Annotated[int, num_threads("Threads of the training, for the throughput.")] = 1
    stage: Annotated[int | None, Flag("The stage meant to be joined.", shown=False, least=0)] = None
    host_maddrs: ListenAddresses = ANY_PORT
    home: Home = None
    identity_path: IdentityPath = None
    as_json: Annotated[bool, Flag("One JSON object instead of a table.", name="json")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    model: Annotated[str, Positional("A run.toml, a preset of `init`, or 7b, 13b, 70b or 107b.")]
    peers: Annotated[int, Flag("So many, all alike.", least=1)] = 4
    stages: Annotated[tuple[int, ...], Flag("Look at these cuts alone; may be repeated.", shown="usual ones")] = ()
    up: Annotated[float, Flag("Mbit/s that a peer can send.", least=0.001)] = 20.0
    down: Annotated[float, Flag("Mbit/s that a peer can receive.", least=0.001)] = 100.0
    rtt: Annotated[float, Flag("Milliseconds from one peer to another and back.", least=0)] = 50.0
    by_site: Annotated[
        bool,
        Flag("The stages of a replica are at one site (join --site), which has one line: --up and --down are its."),
    ] = False
    memory: Annotated[float | None, Flag("GB that a peer may take.", shown="any", least=0.1)] = None
    tokens_per_s: Annotated[
        float | None,
        Flag("Of the whole model on one peer, were there room.", shown="measured on this machine", least=1e-6),
    ] = None
    tflops: Annotated[
        float | None, Flag("The same by what a peer's device really computes.", shown=False, least=1e-6)
    ] = None
    device: Device = "cpu"
    threads: Annotated[int, num_threads("Threads of the training, where this machine is measured.")] = 1
    price_hour: Annotated[float, Flag("Of a peer's machine, in any currency.", shown=False, least=0)] = 0.0
    price_gb: Annotated[float, Flag("Of what it sends.", shown=False, least=0)] = 0.0
    as_json: Annotated[bool, Flag("One JSON object instead of a table.", name="json")] = False


# ---- of who looks on -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFlags:
    stages: Annotated[int, Flag("Pipeline stages.", least=1, most=32)] = 2
    replicas: Annotated[int, Flag("Peers of each stage.", least=1, most=16)] = 2
    rounds: Annotated[
        int | None, Flag("Outer rounds, if they stay as long as they begin: 128, with stages 32.", least=1, most=10**9)
    ] = None
    inner_steps: Annotated[int | None, Flag("Inner steps a round (H).", shown=False, least=1, most=10**9)] = None
    overlap: Annotated[str | None, Flag("arrival, one-step or none.", shown=False)] = None
    codec: Annotated[str | None, Flag("none, fp16, int8, int4, int2, sign, topk or lowrank-int4.", shown=False)] = None
    inner_optimizer: Annotated[str | None, Flag("adamw or muon.", shown=False)] = None
    schedule: Annotated[str | None, Flag("carry or flush.", shown=False)] = None
    trace: Annotated[
        Path | None,
        Flag(
            "Draw where the micro-batches' time went: an SVG picture or, as FILE.json, a trace for ui.perfetto.dev.",
            shown=False,
        ),
    ] = None
    data: Annotated[tuple[Path, ...], Flag("Text to train on instead of the standard library.", shown=False)] = ()
    report: Annotated[Path | None, Flag("Write the JSON report here.", shown=False)] = None
    seed: Annotated[int, Flag("Of the run.", least=0)] = 0
    timeout: Annotated[float, Flag("Seconds after which the demo gives up.", least=10)] = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateFlags(OfPeer):
    link: Annotated[
        str, Positional("The run's link, or the folder of a model or of a run that is kept.", metavar="LINK_OR_FOLDER")
    ]
    name: Name = "evaluator"
    data: Annotated[tuple[Path, ...], Flag("Text; of a folder, what it is evaluated on. May repeat.", shown=False)] = ()
    context: Annotated[
        int | None, Flag("Tokens a sequence, of a folder.", shown="1024, or less if the model has less", least=2)
    ] = None
    tokens: Annotated[int, Flag("Tokens to evaluate on at most, of a folder.", least=1)] = 200_000
    tasks: Annotated[
        tuple[str, ...], Flag("Of a folder: a benchmark of lm-evaluation-harness; may repeat.", shown=False)
    ] = ()
    task_files: Annotated[Path | None, Flag("Folder with more of its benchmarks.", shown=False)] = None
    limit: Annotated[int | None, Flag("Questions of a benchmark.", shown="all", least=1)] = None
    threads: Annotated[int | None, num_threads("Of the computation, of a folder.", shown="all")] = None
    column: Column = "text"
    tokenizer: TokenizerPath = None
    base: BasePath = None
    host_maddrs: ListenAddresses = ANY_PORT
    home: Home = None
    log: Log = LogFormat.AUTO
    average: Annotated[
        float | None,
        Flag(
            "Also evaluate a running average of the anchors, with this decay a round.",
            shown=False,
            least=0.0,
            most=0.999,
        ),
    ] = None
    until_stdin_closes: UntilStdinCloses = False

    @property
    def is_run_folder(self) -> bool:
        """Whether a folder is named that a keeper of a run writes into."""
        return not self.link.startswith("dilocox:") and (Path(self.link) / "manifest.json").is_file()


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFlags:
    """Where a model is taken from: at most one of link and run_folder (and generate's --model); none means the runs in home."""

    link: Annotated[
        str | None, Positional("The run's dilocox:// link; without it: what lies on this disk.", shown=False)
    ] = None
    run_folder: Annotated[
        tuple[Path, ...], Flag("A peer's folder of the run (HOME/peers/NAME/runs/RUN); may repeat.", shown=False)
    ] = ()
    home: Home = None
    name: Annotated[str | None, Flag("Look at this peer of --home alone.", shown="all of them")] = None
    manifest: Annotated[Path | None, Flag("The run's run.toml, where the folder lacks it.", shown=False)] = None
    timeout: Annotated[float, Flag("Seconds to wait for a round that all stages have.", least=1)] = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFlags:
    source: SourceFlags
    as_json: Annotated[bool, Flag("One JSON object.", name="json")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFlags:
    out: Annotated[Path, Flag("Folder to write.")] = Path("model")
    tokenizer: TokenizerPath = None
    source: SourceFlags
    model: Annotated[
        Path | None,
        Flag("Folder of the published model that the run began with, for its tokenizer.", shown="its source"),
    ] = None
    dtype: Annotated[WeightType | None, Flag("Of the weights of a published model.", shown="the source's")] = None
    adapter: Annotated[
        bool, Flag("Of a run of adapters (LoRA): write them alone, as peft loads them.", has_opposite=True)
    ] = False
    force: Annotated[bool, Flag("Replace an export that is there.", has_opposite=True)] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateFlags:
    prompt: Annotated[str, Positional("Text to go on from.")]
    model: Annotated[Path | None, Flag("A folder that `export` wrote, or a published model's.", shown=False)] = None
    tokens: Annotated[int, Flag("Tokens to write; in a run of bytes each is one.", least=0)] = 256
    temperature: Annotated[float, Flag("0: always the likeliest.", least=0.0)] = 0.8
    top_k: Annotated[int, Flag("Draw among that many likeliest; 0: all.", least=0)] = 40
    seed: Annotated[
        int | None, Flag("Equal seeds give equal text.", shown="another each time", least=0, most=2**63 - 1)
    ] = None
    device: Device = "cpu"
    threads: Annotated[int | None, num_threads("Of the computation.", shown="1 for a small model, else all")] = None
    tokenizer: TokenizerPath = None
    base: BasePath = None
    source: SourceFlags
