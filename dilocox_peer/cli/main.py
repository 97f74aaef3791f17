"""The command line: names, flags and exit codes. What each command does is in its own file, imported when it runs, so
that `--help` loads neither torch nor hivemind.

Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 3 cannot reach the run, 4 refused by the run, 130 interrupted.
Every flag has an environment variable: DILOCOX_<COMMAND>_<FLAG>, e.g. DILOCOX_JOIN_NAME. `_` may stand for `-` in flags.
"""

import io
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dilocox_peer import __version__
from dilocox_peer.errors import DilocoxError

app = typer.Typer(
    name="dilocox-peer",
    help="Train one language model together with others, over ordinary internet links.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "DILOCOX"},
)

PROGRAM = "dilocox-peer"


class LogFormat(StrEnum):
    """auto: lines for people; json: one event a line, for programs."""

    AUTO = "auto"
    JSON = "json"


class AdmissionMode(StrEnum):
    """Values of the manifest's admission section."""

    OPEN = "open"
    INVITE = "invite"
    LIST = "list"


NameOption = Annotated[
    str,
    typer.Option("--name", help="Names this peer on this machine: its key and state live in a folder of that name."),
]
HomeOption = Annotated[
    Path | None,
    typer.Option("--home", help="Folder for keys and state.", show_default="$XDG_DATA_HOME/dilocox-peer"),
]
IdentityOption = Annotated[
    Path | None,
    typer.Option("--identity-path", help="Key file; made if missing.", show_default="in the peer's folder"),
]
HostOption = Annotated[
    list[str] | None,
    typer.Option("--host-maddrs", help="Listen here, e.g. /ip4/0.0.0.0/tcp/4711; may repeat.", show_default=False),
]
AnnounceOption = Annotated[
    list[str] | None,
    typer.Option("--announce-maddrs", help="Tell others to dial this, e.g. /ip4/PUBLIC/tcp/4711.", show_default=False),
]
LogOption = Annotated[LogFormat, typer.Option("--log", help="auto: lines for people; json: an event a line.")]
StdinOption = Annotated[
    bool, typer.Option("--until-stdin-closes", hidden=True, help="Leave when standard input ends (for supervisors).")
]


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """Train one language model together with others, over ordinary internet links."""


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("run.toml"),
    preset: Annotated[str, typer.Option(help="tiny, small, 125m or 1.3b.")] = "tiny",
    stages: Annotated[int | None, typer.Option(min=1, help="Pipeline stages.", show_default="the preset's")] = None,
    run_name: Annotated[str | None, typer.Option(help="Shown to volunteers.", show_default="the preset")] = None,
    admission: Annotated[
        AdmissionMode, typer.Option(help="open: everybody may join; invite: whom you invite; list: edit the file.")
    ] = AdmissionMode.OPEN,
    owner_key: Annotated[
        Path | None,
        typer.Option(help="The owner's key; made if missing.", show_default="owner.key in --home"),
    ] = None,
    home: HomeOption = None,
    force: Annotated[bool, typer.Option(help="Overwrite the file.")] = False,
) -> None:
    """Write a commented run.toml, signed with the owner's key."""
    from dilocox_peer.cli.init import write_run_file

    write_run_file(
        path,
        preset=preset,
        run_name=run_name,
        stages=stages,
        admission=admission.value,
        owner_key=owner_key,
        home=home,
        force=force,
    )


@app.command()
def sign(
    path: Annotated[Path, typer.Argument(help="The run.toml to sign.")] = Path("run.toml"),
    owner_key: Annotated[Path | None, typer.Option(help="The owner's key.", show_default="owner.key in --home")] = None,
    home: HomeOption = None,
) -> None:
    """Sign run.toml again after a change. The run id changes: it is another run."""
    from dilocox_peer.cli.init import sign_run_file

    sign_run_file(path, owner_key=owner_key, home=home)


@app.command()
def bootstrap(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN_FILES", help="Signed run.toml of each run.", show_default="run.toml"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="TCP port on all interfaces, further runs the next ones; 0: any.",
            show_default="4711",
        ),
    ] = None,
    host_maddrs: HostOption = None,
    announce_maddrs: AnnounceOption = None,
    initial_peers: Annotated[
        list[str] | None, typer.Option(help="Multiaddrs of other bootstraps or peers of the run.", show_default=False)
    ] = None,
    health: Annotated[
        bool, typer.Option("--health", help="Say in one line how the one that runs does; exit code 0 or 1.")
    ] = False,
    owner_key: Annotated[
        Path | None,
        typer.Option(
            help="The owner's key: signs first rosters and checkpoints, and redeems invitations.",
            show_default="owner.key, in --home or beside the state",
        ),
    ] = None,
    name: NameOption = "bootstrap",
    home: HomeOption = None,
    identity_path: IdentityOption = None,
    log: LogOption = LogFormat.AUTO,
    until_stdin_closes: StdinOption = False,
) -> None:
    """Run the entry point of a run, or of several: DHT node and manifest. Prints the line with which others join."""
    from dilocox_peer.cli.home import PeerHome, default_home

    if health:
        from dilocox_peer.cli.health import show_health

        show_health(PeerHome.at(home, name, identity_path))
    from dilocox_peer.cli.bootstrap import BootstrapRequest, run_bootstrap

    run_bootstrap(
        BootstrapRequest(
            paths=tuple(paths or (Path("run.toml"),)),
            home=PeerHome.at(home, name, identity_path),
            port=port,
            host_maddrs=tuple(host_maddrs or ()),
            announce_maddrs=tuple(announce_maddrs or ()),
            initial_peers=tuple(initial_peers or ()),
            owner_home=home or default_home(),
            owner_key=owner_key,
            json_log=log is LogFormat.JSON,
            until_stdin_closes=until_stdin_closes,
        )
    )


RunFileArgument = Annotated[Path, typer.Argument(metavar="RUN_FILE", help="The run's signed run.toml.")]
OwnerKeyOption = Annotated[
    Path | None, typer.Option("--owner-key", help="The key that signed it.", show_default="owner.key in --home")
]


@app.command()
def invite(
    path: RunFileArgument = Path("run.toml"),
    for_peer: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="PEERID",
            help="Invite this peer alone; nobody has to redeem it.",
            envvar="DILOCOX_INVITE_FOR",
            show_default=False,
        ),
    ] = None,
    uses: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Invite so many, whoever comes first.", show_default="1")
    ] = None,
    expires: Annotated[
        str, typer.Option(help="After so long it is worth nothing, nor is who came in by it: 90m, 12h, 7d, 4w.")
    ] = "30d",
    rights: Annotated[str, typer.Option(help="join: train and read; read: export, evaluate, generate alone.")] = "join",
    address: Annotated[
        list[str] | None,
        typer.Option(
            help="Multiaddr where the run is entered; may repeat.", show_default="the bootstrap's on this machine"
        ),
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="The link that `bootstrap` printed, instead of --address.", show_default=False)
    ] = None,
    owner_key: OwnerKeyOption = None,
    name: NameOption = "bootstrap",
    home: HomeOption = None,
) -> None:
    """Print a link that lets its reader into a run with admission "invite". Whoever has the link has the invitation."""
    from dilocox_peer.cli.invite import InviteRequest, run_invite

    run_invite(
        InviteRequest(
            path=path,
            for_peer=for_peer,
            uses=uses,
            expires=expires,
            rights=rights,
            addresses=tuple(address or ()),
            link=link,
            owner_key=owner_key,
            home=home,
            name=name,
        )
    )


@app.command()
def revoke(
    path: RunFileArgument,
    target: Annotated[
        str, typer.Argument(metavar="WHAT", help="An invitation's id, the link it is in, or the PeerID of who came in.")
    ],
    link: Annotated[
        str | None,
        typer.Option(
            help="Tell the run at once, over its link; for a bootstrap on another machine.", show_default=False
        ),
    ] = None,
    owner_key: OwnerKeyOption = None,
    home: HomeOption = None,
) -> None:
    """Take an invitation back, with every pass made of it, or put a peer out: the others hear it no more."""
    from dilocox_peer.cli.invite import run_revoke

    run_revoke(path, target, link=link, owner_key=owner_key, home=home)


@app.command()
def join(
    link: Annotated[str, typer.Argument(help="The dilocox:// link that `bootstrap` printed.")],
    name: NameOption = "default",
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Text files, JSONL or folders to train on; may repeat.", show_default="as the run says"),
    ] = None,
    stage: Annotated[int | None, typer.Option(min=0, help="Insist on this stage.", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads of the training.")] = 1,
    initial_peers: Annotated[
        list[str] | None, typer.Option(help="More multiaddrs to enter by, beside the link's.", show_default=False)
    ] = None,
    host_maddrs: HostOption = None,
    announce_maddrs: AnnounceOption = None,
    link_maddrs: Annotated[
        list[str] | None,
        typer.Option(
            help="Listen here for activations of neighbouring stages.",
            show_default="like --host-maddrs, any port",
        ),
    ] = None,
    outgoing_only: Annotated[
        bool,
        typer.Option("--outgoing-only", help="Others cannot dial this computer: it holds stage 0, which dials."),
    ] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Log where each micro-batch's time goes.")] = False,
    mdns: Annotated[bool, typer.Option("--mdns", help="Find neighbours of the same local network by mDNS.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines in a terminal too, no dashboard.")] = False,
    log_file: Annotated[
        Path | None, typer.Option(help="Append every event to this JSONL file as well.", show_default=False)
    ] = None,
    log_file_size: Annotated[float, typer.Option(min=0.001, help="MB after which it is rotated.")] = 10.0,
    log_file_count: Annotated[int, typer.Option(min=0, max=1000, help="Rotated files to keep.")] = 5,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Serve Prometheus metrics there.", show_default="off"),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="Address of the metrics; if not loopback, others can read them.")
    ] = "127.0.0.1",
    nice: Annotated[int, typer.Option(min=0, max=19, help="Give way to other programs; 19: to all.")] = 0,
    max_upload: Annotated[
        float | None,
        typer.Option(help="Mbit/s for contributions, state and activations sent.", show_default="no limit"),
    ] = None,
    max_download: Annotated[
        float | None,
        typer.Option(help="Mbit/s for contributions, state and activations received.", show_default="no limit"),
    ] = None,
    max_memory: Annotated[
        float | None,
        typer.Option(min=0.001, help="GB; a stage that needs more is not taken.", show_default="what is free"),
    ] = None,
    backup_stages: Annotated[
        int, typer.Option(min=0, help="Other stages of which to keep a copy on disk, should nobody of them be left.")
    ] = 1,
    hours: Annotated[
        str | None,
        typer.Option(help="Train only then, local time, e.g. 22:00-07:00; paused otherwise.", show_default=False),
    ] = None,
    only_idle: Annotated[
        bool, typer.Option("--only-idle", help="Train only while other programs leave the processor alone.")
    ] = False,
    home: HomeOption = None,
    identity_path: IdentityOption = None,
    log: LogOption = LogFormat.AUTO,
    until_stdin_closes: StdinOption = False,
) -> None:
    """Join a run and train: paste the link, nothing else is needed. Ctrl-C leaves; the same command comes back."""
    from dilocox_peer.cli.home import PeerHome
    from dilocox_peer.cli.join import JoinRequest, run_join

    run_join(
        JoinRequest(
            link=link,
            home=PeerHome.at(home, name, identity_path),
            data=tuple(data or ()),
            stage=stage,
            device=device,
            threads=threads,
            initial_peers=tuple(initial_peers or ()),
            host_maddrs=tuple(host_maddrs or ("/ip4/0.0.0.0/tcp/0",)),
            announce_maddrs=tuple(announce_maddrs or ()),
            link_maddrs=tuple(link_maddrs or ()),
            outgoing_only=outgoing_only,
            trace=trace,
            mdns=mdns,
            json_log=log is LogFormat.JSON,
            until_stdin_closes=until_stdin_closes,
            plain=plain,
            log_file=log_file,
            log_file_mb=log_file_size,
            log_file_count=log_file_count,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
            nice=nice,
            max_upload_mbit_s=max_upload,
            max_download_mbit_s=max_download,
            max_memory_gb=max_memory,
            backup_stages=backup_stages,
            hours=hours,
            only_idle=only_idle,
        )
    )


def _send(command: str, home: Path | None, name: str) -> None:
    from dilocox_peer.cli.home import PeerHome
    from dilocox_peer.cli.operate import send

    send(command, PeerHome.at(home, name, None))


@app.command()
def pause(name: NameOption = "default", home: HomeOption = None) -> None:
    """Have a running peer of this machine stop training and stay: it votes, fetches and serves on."""
    _send("pause", home, name)


@app.command()
def resume(name: NameOption = "default", home: HomeOption = None) -> None:
    """Have a paused peer of this machine train again."""
    _send("resume", home, name)


@app.command()
def leave(name: NameOption = "default", home: HomeOption = None) -> None:
    """Have a running peer of this machine leave in order, as Ctrl-C there does."""
    _send("leave", home, name)


@app.command()
def recover(
    tip: Annotated[
        str | None, typer.Argument(help="Of the branch to go back to; without it: what is kept.", show_default=False)
    ] = None,
    run: Annotated[str, typer.Option(help="Beginning of the run's id, of a peer of several runs.")] = "",
    owner_key: Annotated[
        Path | None,
        typer.Option(
            help="Sign for that branch, so that the others follow.", show_default="owner.key in --home, if there"
        ),
    ] = None,
    name: NameOption = "default",
    home: HomeOption = None,
    identity_path: IdentityOption = None,
) -> None:
    """Go back to rounds that this peer has left for a better supported branch. The peer must not be running."""
    from dilocox_peer.cli.home import PeerHome, default_home
    from dilocox_peer.cli.recover import RecoverRequest, run_recover

    run_recover(RecoverRequest(tip, PeerHome.at(home, name, identity_path), run, owner_key, home or default_home()))


@app.command()
def status(
    link: Annotated[
        str | None,
        typer.Argument(
            help="The run's link: who holds what; without it: the peer on this machine.", show_default=False
        ),
    ] = None,
    name: NameOption = "default",
    as_json: Annotated[bool, typer.Option("--json", envvar="DILOCOX_STATUS_JSON", help="One JSON object.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, until Ctrl-C.")] = False,
    home: HomeOption = None,
) -> None:
    """Say how a run stands, from its peers' announcements and without joining, or how a peer of this machine does."""
    from dilocox_peer.cli.home import PeerHome
    from dilocox_peer.cli.operate import show_peer, show_run

    if link is None:
        show_peer(PeerHome.at(home, name, None), as_json=as_json, watch=watch)
    else:
        show_run(link, as_json=as_json, watch=watch)


@app.command()
def dashboard(name: NameOption = "default", home: HomeOption = None) -> None:
    """Open the dashboard of a peer that runs on this machine, as `join` shows it. q closes it, the peer goes on."""
    from dilocox_peer.cli.home import PeerHome
    from dilocox_peer.cli.operate import attach

    attach(PeerHome.at(home, name, None))


@app.command()
def replay(
    path: Annotated[Path, typer.Argument(help="A JSONL file that `join --log-file` wrote.")],
    speed: Annotated[float, typer.Option(min=0.01, max=100_000, help="Times as fast as it happened.")] = 10.0,
) -> None:
    """Play a peer's event log in the dashboard. space: stop and go on, + and -: faster and slower, q: end."""
    from dilocox_peer.cli.replay import run_replay

    run_replay(path, speed=speed)


@app.command()
def demo(
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 2,
    replicas: Annotated[int, typer.Option(min=1, max=16, help="Peers of each stage.")] = 2,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Outer rounds, if they stay as long as they begin: 128, with stages 32.")
    ] = None,
    inner_steps: Annotated[int | None, typer.Option(min=1, help="Inner steps a round (H).", show_default=False)] = None,
    overlap: Annotated[str | None, typer.Option(help="arrival, one-step or none.", show_default=False)] = None,
    codec: Annotated[
        str | None, typer.Option(help="none, fp16, int8, int4, int2, sign, topk or lowrank-int4.", show_default=False)
    ] = None,
    inner_optimizer: Annotated[str | None, typer.Option(help="adamw or muon.", show_default=False)] = None,
    schedule: Annotated[str | None, typer.Option(help="carry or flush.", show_default=False)] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Draw where the micro-batches' time went, as an SVG picture.", show_default=False),
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="Text to train on instead of the standard library.", show_default=False)
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the JSON report here.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the run.")] = 0,
    timeout: Annotated[float, typer.Option(min=10, help="Seconds after which the demo gives up.")] = 900.0,
) -> None:
    """A whole swarm on this machine: real processes, real sockets, real training. Ends by itself."""
    from dilocox_peer.cli.demo import DemoRequest, run_demo

    run_demo(
        DemoRequest(
            stages=stages,
            replicas=replicas,
            rounds=rounds,
            inner_steps=inner_steps,
            overlap=overlap,
            codec=codec,
            inner_optimizer=inner_optimizer,
            data=tuple(data or ()),
            report=report,
            seed=seed,
            timeout_s=timeout,
            schedule=schedule,
            trace=trace,
        )
    )


@app.command(hidden=True)
def evaluate(
    link: Annotated[str, typer.Argument(help="The run's link.")],
    name: NameOption = "evaluator",
    data: Annotated[list[Path] | None, typer.Option(show_default=False)] = None,
    host_maddrs: HostOption = None,
    home: HomeOption = None,
    log: LogOption = LogFormat.AUTO,
    average: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=0.999,
            help="Also evaluate a running average of the anchors, with this decay a round.",
            show_default=False,
        ),
    ] = None,
    until_stdin_closes: StdinOption = False,
) -> None:
    """Follow a run and evaluate the anchors of its rounds on the validation split; trains nothing."""
    from dilocox_peer.cli.evaluate import run_evaluator
    from dilocox_peer.cli.home import PeerHome

    run_evaluator(
        link,
        home=PeerHome.at(home, name, None),
        data=tuple(data or ()),
        host_maddrs=tuple(host_maddrs or ("/ip4/0.0.0.0/tcp/0",)),
        json_log=log is LogFormat.JSON,
        until_stdin_closes=until_stdin_closes,
        average=average,
    )


LinkArgument = Annotated[
    str | None,
    typer.Argument(help="The run's dilocox:// link; without it: what lies on this disk.", show_default=False),
]
RunFolderOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--run-folder", help="A peer's folder of the run (HOME/peers/NAME/runs/RUN); may repeat.", show_default=False
    ),
]
ManifestOption = Annotated[
    Path | None, typer.Option("--manifest", help="The run's run.toml, where the folder lacks it.", show_default=False)
]
OnePeerOption = Annotated[
    str | None,
    typer.Option("--name", help="Look at this peer of --home alone.", show_default="all of them"),
]
FetchTimeoutOption = Annotated[
    float, typer.Option("--timeout", min=1, help="Seconds to wait for a round that all stages have.")
]


@app.command()
def export(
    link: LinkArgument = None,
    out: Annotated[Path, typer.Option("--out", help="Folder to write.")] = Path("model"),
    run_folder: RunFolderOption = None,
    home: HomeOption = None,
    name: OnePeerOption = None,
    manifest: ManifestOption = None,
    timeout: FetchTimeoutOption = 120.0,
    force: Annotated[bool, typer.Option(help="Replace an export that is there.")] = False,
) -> None:
    """Write the newest agreed model as a Hugging Face folder, from a live run or from this disk."""
    from dilocox_peer.cli.export import run_export
    from dilocox_peer.cli.source import SourceRequest

    source = SourceRequest(
        link=link, run_folders=tuple(run_folder or ()), home=home, name=name, manifest=manifest, timeout_s=timeout
    )
    run_export(out, source, force=force)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to go on from.")],
    link: LinkArgument = None,
    model: Annotated[
        Path | None, typer.Option(help="A folder that `export` wrote, instead of a run.", show_default=False)
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Bytes to write.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among that many likeliest; 0: all.")] = 40,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**63 - 1, help="Equal seeds give equal text.", show_default="another each time"),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Of the computation.", show_default="1 for a small model, else all"),
    ] = None,
    run_folder: RunFolderOption = None,
    home: HomeOption = None,
    name: OnePeerOption = None,
    manifest: ManifestOption = None,
    timeout: FetchTimeoutOption = 120.0,
) -> None:
    """Write text with the newest agreed model of a live run, of this disk, or of an export."""
    from dilocox_peer.cli.generate import GenerateRequest, run_generate
    from dilocox_peer.cli.source import SourceRequest

    source = SourceRequest(
        link=link,
        model=model,
        run_folders=tuple(run_folder or ()),
        home=home,
        name=name,
        manifest=manifest,
        timeout_s=timeout,
    )
    run_generate(
        GenerateRequest(
            prompt=prompt,
            source=source,
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            device=device,
            threads=threads,
        )
    )


@app.command()
def doctor(
    link: Annotated[
        str | None, typer.Argument(help="The run's link; without it only this machine is checked.", show_default=False)
    ] = None,
    name: NameOption = "default",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads of the training, for the throughput.")] = 1,
    stage: Annotated[int | None, typer.Option(min=0, help="The stage meant to be joined.", show_default=False)] = None,
    host_maddrs: HostOption = None,
    home: HomeOption = None,
    identity_path: IdentityOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="DILOCOX_DOCTOR_JSON", help="One JSON object instead of a table.")
    ] = False,
) -> None:
    """Check everything a peer needs, here and on the way to the run. Exit code 1 when something would fail."""
    from dilocox_peer.cli.doctor import DoctorRequest, run_doctor
    from dilocox_peer.cli.home import PeerHome

    run_doctor(
        DoctorRequest(
            link=link,
            home=PeerHome.at(home, name, identity_path),
            device=device,
            threads=threads,
            stage=stage,
            host_maddrs=tuple(host_maddrs or ("/ip4/0.0.0.0/tcp/0",)),
            as_json=as_json,
        )
    )


def main() -> None:
    """Carries out what was typed. Turns every expected failure into one line on standard error and its exit code."""
    arguments = [_with_dashes(argument) for argument in sys.argv[1:]]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? where it must
    try:
        app(arguments, prog_name=PROGRAM)  # exits by itself: 0, 2 for wrong usage, or what a command said
    except DilocoxError as error:
        typer.echo(f"{PROGRAM}: {error.line}", err=True)
        sys.exit(error.exit_code)


def _with_dashes(argument: str) -> str:
    """--initial_peers=X as --initial-peers=X: hivemind's and Petals' users type underscores."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value
