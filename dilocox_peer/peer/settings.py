"""What a volunteer decides of a session, and where it stands. Each of the decisions is a flag of `join`, declared here and
nowhere else; so this loads nothing heavy: `--help` reads it."""

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dilocox_peer.errors import ConfigError
from dilocox_peer.flags import Flag, num_threads
from dilocox_peer.types import RunId

if TYPE_CHECKING:
    from dilocox_peer.admission import Grant
    from dilocox_peer.network.transport import TransportLimits

ANY_PORT = ("/ip4/0.0.0.0/tcp/0",)

ListenAddresses = Annotated[tuple[str, ...], Flag("Listen here, e.g. /ip4/0.0.0.0/tcp/4711; may repeat.", shown=False)]
AnnouncedAddresses = Annotated[
    tuple[str, ...], Flag("Tell others to dial this, e.g. /ip4/PUBLIC/tcp/4711.", shown=False)
]
Column = Annotated[str, Flag("Field of JSONL or column of parquet with the text.")]
RelayBudget = Annotated[
    str, Flag("Mbit/s to pass on for peers that nobody can dial, as upload; off: nothing.", metavar="MBIT_S")
]
MAX_MBIT_S = 1e6
TOLD_OF_MONTH, MONTH_S = 0.1, 30 * 86400.0  # of --max-gb-month, that strangers may be told of the chain
TokenizerPath = Annotated[
    Path | None, Flag("The run's tokenizer.json, or the folder it is in.", shown="the one kept in --home")
]


class ComputePrecision(StrEnum):
    """Of forwards and backwards."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class OnBattery(StrEnum):
    """What training does while the machine runs on its battery."""

    PAUSE = "pause"
    GO = "go"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """How this peer takes part."""

    data: Annotated[
        tuple[Path, ...],
        Flag(
            "Text, JSONL, parquet, or folders to train on; may repeat. In a run of shards: a folder of them.",
            shown="as the run says",
        ),
    ] = ()
    column: Column = "text"
    local_data_url: Annotated[
        bool,
        Flag("Fetch shards from the run's data.url also where that is this machine or its network: of a run of yours."),
    ] = False
    tokenizer: TokenizerPath = None
    model: Annotated[
        Path | None,
        Flag("Folder of the published model that the run starts from.", shown="where the run's owner had it"),
    ] = None
    stage: Annotated[int | None, Flag("Insist on this stage.", shown=False, least=0)] = None
    device: Annotated[
        str, Flag("cpu, cuda, cuda:N, xpu or mps; several with commas compute together; auto: the best here.")
    ] = "cpu"
    gpus: Annotated[
        str, Flag("Cards by number, e.g. 0,1,2,3, that compute together: --device cuda:0,cuda:1,...", shown=False)
    ] = ""
    precision: Annotated[
        ComputePrecision,
        Flag(
            "Of the computation: float32, or where the device is fast at it bfloat16 or float16. Weights stay in float32."
        ),
    ] = ComputePrecision.FLOAT32
    compile: Annotated[bool, Flag("Compile layers with torch.compile: slow to start, then faster on most cards.")] = (
        False
    )
    base_bits: Annotated[
        int,
        Flag(
            "Of a run of adapters: hold the weights beside them in 8 or 4 bits.", shown="as they are", least=0, most=8
        ),
    ] = 0
    threads: Annotated[int, num_threads("Threads of the training.")] = 1
    initial_peers: Annotated[tuple[str, ...], Flag("More multiaddrs to enter by, beside the link's.", shown=False)] = ()
    host_maddrs: ListenAddresses = ANY_PORT
    announce_maddrs: AnnouncedAddresses = ()
    link_maddrs: Annotated[
        tuple[str, ...],
        Flag("Listen here for activations of neighbouring stages.", shown="like --host-maddrs, any port"),
    ] = ()
    outgoing_only: Annotated[bool, Flag("Others cannot dial this computer: it holds stage 0, which dials.")] = False
    site: Annotated[
        str,
        Flag(
            "Name of where this computer is; micro-batches stay among peers of one site.", shown="as links are measured"
        ),
    ] = ""
    trace: Annotated[bool, Flag("Log where each micro-batch's time goes.")] = False
    public_name: Annotated[
        str,
        Flag("What to call you on the run's page; public, and anybody may take any.", shown="the end of the PeerID"),
    ] = ""
    mdns: Annotated[bool, Flag("Find neighbours of the same local network by mDNS.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AtMost:
    """What it gives of this machine. None: no limit."""

    max_upload: Annotated[
        float | None,
        Flag(
            "Mbit/s for contributions, state and activations sent.",
            shown="0.8 of what the line carries, less while others wait",
        ),
    ] = None
    max_download: Annotated[
        float | None, Flag("Mbit/s for contributions, state and activations received.", shown="no limit")
    ] = None
    max_gb_month: Annotated[
        float | None,
        Flag("GB sent and received in a calendar month; then it leaves until the next.", shown="no limit", least=0.001),
    ] = None
    relay: RelayBudget = "20"
    max_memory: Annotated[
        float | None, Flag("GB; a stage that needs more is not taken.", shown="what is free", least=0.001)
    ] = None
    max_disk: Annotated[
        float | None,
        Flag("GB for all that it writes: states, contributions, copies, shards, logs.", shown="no limit", least=0.01),
    ] = None
    backup_stages: Annotated[
        int, Flag("Other stages of which to keep a copy on disk, should nobody of them be left.", least=0)
    ] = 1

    @property
    def limits(self) -> "TransportLimits":
        from dilocox_peer.network.transport import TransportLimits  # it loads hivemind

        up, down = (None if mbit_s is None else mbit_s * 1e6 / 8 for mbit_s in (self.max_upload, self.max_download))
        told = TransportLimits().told_bytes_per_s
        if self.max_gb_month is not None:  # strangers may ask for pages of the chain day and night
            told = min(told, TOLD_OF_MONTH * self.max_gb_month * 1e9 / MONTH_S)
        return TransportLimits(told_bytes_per_s=told, upload_bytes_per_s=up, download_bytes_per_s=down)


def cards(gpus: str) -> str:
    """What --device is to say for `--gpus`. Raises ConfigError for what names no cards."""
    numbers = [each.strip() for each in gpus.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,3}", each) for each in numbers):
        raise ConfigError(f"--gpus {gpus}: numbers of cards with commas between, as nvidia-smi lists them, e.g. 0,1")
    return ",".join(f"cuda:{int(each)}" for each in numbers)


def check_device(wanted: str) -> None:
    """Raises ConfigError for what `--device` cannot mean on any machine."""
    if not all(
        re.fullmatch(r"auto|(cpu|mps)(:0)?|(cuda|xpu)(:[0-9]{1,3})?", each.strip()) for each in wanted.split(",")
    ):
        raise ConfigError(
            f"--device {wanted} is no device: use auto, cpu, mps, xpu, cuda, or cuda:N for one of several cards; commas between several"
        )


def relay_bytes_per_s(said: str) -> float | None:
    """The budget of `--relay`; None: it passes nothing on. Raises ConfigError."""
    if said == "off":
        return None
    try:
        mbit_s = float(said)
    except ValueError:
        mbit_s = 0.0
    if not 0.1 <= mbit_s <= MAX_MBIT_S:
        raise ConfigError(f"--relay {said}: Mbit/s, at least 0.1, or off")
    return mbit_s * 1e6 / 8


@dataclass(frozen=True, slots=True)
class Wish:
    """What the volunteer says of the stage. stage: None leaves it to the swarm's need; max_memory_bytes, max_disk_bytes: None allows
    all there is."""

    stage: int | None
    device: str
    max_memory_bytes: int | None
    base_bits: int = 0
    max_disk_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Folders are of this peer alone; run_folder holds what survives a restart, tokenizers those
    that peers of this machine have used. initial_peers: with those of the link."""

    run_id: RunId
    link: str  # as the volunteer gave it
    initial_peers: tuple[str, ...]
    grant: "Grant | None"  # the invitation in the link
    runtime_dir: Path
    identity_path: Path
    run_folder: Path
    tokenizers: Path
    choices: Choices
    at_most: AtMost

    @property
    def wish(self) -> Wish:
        gb, disk_gb = self.at_most.max_memory, self.at_most.max_disk
        return Wish(
            self.choices.stage,
            self.choices.device,
            None if gb is None else int(gb * 1e9),
            self.choices.base_bits,
            None if disk_gb is None else int(disk_gb * 1e9),
        )
