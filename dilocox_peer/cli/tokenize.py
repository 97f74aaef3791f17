"""`tokenize`: shards ahead of time, with a bar; what is left out is said, and an interrupted work is gone on with."""

import os
import time
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dilocox_peer.cli.flags import TokenizeFlags
from dilocox_peer.errors import ConfigError


def run_tokenize(flags: TokenizeFlags) -> None:
    """Raises ConfigError, DiskTakesNothing; what was done until then stays and is gone on with."""
    from dilocox_peer.data.chat import read_template
    from dilocox_peer.data.shards import sizes_of
    from dilocox_peer.data.sources import files_of
    from dilocox_peer.data.tokenizer import JsonTokenizer
    from dilocox_peer.data.tokenizer_files import bounds_beside, read_tokenizer_file
    from dilocox_peer.data.tokenizing import Made, Order, make_shards

    content, borders = None, ("", "")
    if flags.tokenizer is not None:
        content = read_tokenizer_file(flags.tokenizer)
        borders = bounds_beside(flags.tokenizer, content)
        JsonTokenizer(content, bos=borders[0], eos=borders[1], source=str(flags.tokenizer))
    template = None
    if flags.chat:
        if flags.tokenizer is None:
            raise ConfigError(
                "--chat needs --tokenizer with the folder of an instruct model: its chat template writes them out"
            )
        template = read_template(flags.tokenizer if flags.tokenizer.is_dir() else flags.tokenizer.parent)
    files = list(files_of(flags.paths, lambda _: None))  # what is left out is told where it is read
    if not files:
        raise ConfigError(f"{', '.join(map(str, flags.paths))}: no text in it; name files with text in them")
    order = Order(
        flags.paths,
        flags.out,
        content,
        *borders,
        column="messages" if flags.chat and flags.column == "text" else flags.column,
        chat=template,
        mix=_mix(flags),
        validation=flags.validation,
        shard_tokens=flags.shard_tokens,
        processes=flags.processes or os.cpu_count() or 1,
    )
    is_packed = any(path.suffix.lower() in {".gz", ".zst", ".parquet"} for path in files)
    total = None if is_packed else sum(path.stat().st_size for path in files)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    left_out = 0
    started = time.monotonic()

    def refused(line: str) -> None:
        nonlocal left_out
        left_out += 1
        console.print(line, style="yellow", markup=False)

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[made]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("tokenizing", total=total, made="")

        def progress(made: Made) -> None:
            speed = made.text_bytes / 1e6 / max(time.monotonic() - started, 1e-3)
            resumed = f", {made.resumed} were there" if made.resumed else ""
            shown = f"{made.text_bytes / 1e6:,.0f} MB at {speed:.1f} MB/s, {made.documents:,} documents, {made.shards} shards"
            bar.update(task, completed=made.text_bytes, made=shown + resumed)

        catalogue = make_shards(order, refused=refused, progress=progress, force=flags.force)
    train, held_out = sizes_of(catalogue.train), sizes_of(catalogue.held_out)
    text_mb = (train["text_bytes"] + held_out["text_bytes"]) / 1e6
    typer.echo(
        f"wrote {flags.out}: {train['tokens']:,} tokens of {train['documents']:,} documents in {train['shards']} shards to train on, "
        f"{held_out['tokens']:,} held out; {text_mb:,.1f} MB of text"
        + (f"; {train['tokens_an_epoch']:,} tokens an epoch" if train["tokens_an_epoch"] > train["tokens"] else "")
        + (f"; {left_out} lines above say what was left out" if left_out else "")
    )
    typer.echo(f"next: dilocox-peer init --data {flags.out}")


def _mix(flags: TokenizeFlags) -> tuple[tuple[Path, float], ...]:
    """Raises ConfigError."""
    from dilocox_peer.data.catalogue import MAX_TIMES

    mix: dict[Path, float] = {}
    for wish in flags.mix:
        name, equals, number = wish.rpartition("=")
        try:
            times = float(number)
        except ValueError:
            times = 0.0
        if not equals or not (0.0 < times < 1.0 or times in range(1, MAX_TIMES + 1)):
            raise ConfigError(
                f"--mix {wish}: give FILE=TIMES, a whole number up to {MAX_TIMES}, or a share above 0 and below 1"
            )
        if Path(name) not in flags.paths:
            raise ConfigError(f"--mix {wish}: {name} is none of the files named; give it as it stands there")
        if mix.setdefault(Path(name), times) != times:
            raise ConfigError(f"--mix {wish}: {name} has another weight already")
    return tuple(sorted(mix.items()))
