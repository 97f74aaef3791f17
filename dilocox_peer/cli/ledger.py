"""`ledger`: what certificates count of each peer, from a live run or from this disk. Every certificate is verified first."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dilocox_peer.cli.flags import LedgerFlags
from dilocox_peer.cli.home import PeerHome
from dilocox_peer.cli.source import manifest_for, run_folders
from dilocox_peer.errors import ConfigError, ProtocolError, RunUnreachable
from dilocox_peer.events import short
from dilocox_peer.invitation import parse_invitation
from dilocox_peer.manifest import Manifest
from dilocox_peer.plain_json import plain_json
from dilocox_peer.types import PeerId

if TYPE_CHECKING:
    from dilocox_peer.peer.rounds.chain import Place
    from dilocox_peer.peer.rounds.durable import Durable
    from dilocox_peer.peer.state.backup import Annals

LOGS = ("rounds.log", "kept.log")  # of a peer that trains the stage, of who keeps the run
MAX_LOG_BYTES = 1 << 30
NO_CHAIN = "no certificates of this run are here: pass the run's link, --run-folder or --home"


@dataclass
class Books:
    """The verified chains of a run's stages, with what is known beside them. names: that peers gave themselves; remarks: for people."""

    manifest: Manifest
    annals: "Sequence[Annals]"
    names: Mapping[PeerId, str] = field(default_factory=dict)
    remarks: Sequence[str] = ()


def run_ledger(flags: LedgerFlags) -> None:
    """Prints it. Raises ConfigError, RunUnreachable, StateCorrupt."""
    source = flags.source
    if source.link and source.run_folder:
        raise ConfigError("LINK and --run-folder: give one of them")
    if source.link:
        reader = PeerHome.at(source.home, "reader")
        books = asyncio.run(_from_run(source.link, reader, source.timeout))
    else:
        books = _from_disk(source.run_folder or run_folders(source), source.manifest)
    for remark in books.remarks:
        typer.echo(remark, err=True)
    summary = ledger_summary(books)
    typer.echo(plain_json(summary) if flags.as_json else "\n".join(ledger_lines(summary)))


async def _from_run(link: str, reader: PeerHome, timeout_s: float) -> Books:
    from dilocox_peer.cli.visit import visit
    from dilocox_peer.peer.state.survey import look_at_all, surveys
    from dilocox_peer.peer.status import printable

    invitation = parse_invitation(link)
    async with visit(invitation, reader=reader) as open_visit:
        manifest = await open_visit.enter()
        found = surveys(
            manifest, transport=open_visit.transport, directory=open_visit.directory, listener=lambda event: None
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await look_at_all(found)
        if unserved := [str(survey.stage) for survey in found if not survey.annals.certificates]:
            raise RunUnreachable(f"nobody shows the certificates of stage {', '.join(unserved)}: try again later")
        names = {
            lease.peer: printable(lease.public_name)
            for stage in range(manifest.stages.count)
            for lease in await open_visit.directory.peers(stage)
            if lease.public_name
        }
        return Books(manifest, [survey.annals for survey in found], names)


def _from_disk(folders: Sequence[Path], manifest_path: Path | None) -> Books:
    from dilocox_peer.model.architecture import prepare
    from dilocox_peer.peer.rounds.genesis import genesis_of
    from dilocox_peer.peer.state.backup import Annals
    from dilocox_peer.signing import verify

    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--run-folder {folder} is no folder: pass one like HOME/peers/NAME/runs/RUN")
    manifest = manifest_for(folders, manifest_path)
    prepare(manifest)
    remarks, all_annals = [], []
    for stage in range(manifest.stages.count):
        annals = Annals(manifest, stage, verify)
        for path in (folder / f"stage{stage}" / name for folder in folders for name in LOGS):
            durable = _durable(path, genesis_of(manifest, stage))
            if durable is None:
                continue
            try:
                annals.take(_that_is_news(durable.appended, annals))
            except ProtocolError as error:
                remarks.append(f"{path} is not used: {error.reason}")
        if not annals.certificates:
            remarks.append(f"stage {stage}: nothing of it is here")
        all_annals.append(annals)
    if not any(annals.certificates for annals in all_annals):
        raise ConfigError(NO_CHAIN)
    return Books(manifest, all_annals, remarks=remarks)


def _that_is_news(chain: "Sequence[Any]", annals: "Annals") -> "Sequence[Any]":
    """What the chain has beyond what is known: nothing, where it is the beginning of that."""
    return () if chain and annals.holds(chain[-1].head) else chain


def _durable(path: Path, genesis: "Place") -> "Durable | None":
    """None where there is no log. Raises ConfigError."""
    from dilocox_peer.peer.rounds.journal import read_log

    try:
        if path.stat().st_size > MAX_LOG_BYTES:
            raise ConfigError(f"{path} has more than {MAX_LOG_BYTES >> 20} MiB: it is no log of rounds")
        return read_log(path, genesis).durable
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def ledger_summary(books: Books) -> dict[str, Any]:
    """The JSON of `ledger --json`. tokens: that went through a peer's layers and counted; sum over stages only where they are one."""
    from dilocox_peer.peer.rounds.ledger import Ledger

    manifest = books.manifest
    tokens = manifest.inner.micro_batch * manifest.model.context
    stages = []
    for annals in books.annals:
        ledger = Ledger.of(annals.certificates)
        stages.append(
            {
                "stage": annals.stage,
                "rounds": ledger.rounds,
                "certificates": len(annals.certificates),
                "tip": annals.place.head.hex(),
                "tokens": ledger.micro_batches * tokens,
                "peers": [
                    {
                        "peer": each.peer,
                        "name": books.names.get(each.peer, ""),
                        "rounds": each.rounds,
                        "tokens": each.micro_batches * tokens,
                        "share": round(ledger.share_of(each.peer), 4),
                        "contribution_bytes": each.size_bytes,
                        "first_round": each.first_round,
                        "last_round": each.last_round,
                    }
                    for each in ledger.ranked()
                ],
            }
        )
    return {"run": manifest.run_id, "run_name": manifest.run.name, "stages": stages}


def ledger_lines(summary: Mapping[str, Any]) -> list[str]:
    """The same for a person."""
    lines = [f"{summary['run_name']} ({summary['run'][:12]})"]
    for stage in summary["stages"]:
        lines.append(
            f"stage {stage['stage']}: {stage['tokens']:,} tokens in {stage['rounds']} rounds; "
            f"{stage['certificates']} certificates verified, tip {stage['tip'][:12]}"
        )
        width = max((len(each["name"]) for each in stage["peers"]), default=0)
        lines += [
            f"    {short(each['peer'])}  {each['name']:<{width}}{'  ' if width else ''}{each['tokens']:>15,} tokens  {each['share']:>6.1%}  "
            f"{each['rounds']} rounds, {each['first_round']}-{each['last_round']}"
            for each in stage["peers"]
        ]
    return lines
