"""`evaluate FOLDER`: the loss of an exported or published model on a text, in nats a token and bits a byte. No run, no network."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dilocox_peer.cli.flags import EvaluateFlags
from dilocox_peer.cli.harness import run_tasks
from dilocox_peer.cli.model_folder import model_in_folder, tokenizer_in_folder
from dilocox_peer.errors import ConfigError
from dilocox_peer.plain_json import plain_json

if TYPE_CHECKING:
    from torch import Tensor

    from dilocox_peer.data.tokenizer import Tokenizer


def evaluate_folder(folder: Path, flags: EvaluateFlags) -> None:
    """Prints one line, of benchmarks one each. Raises ConfigError, StateCorrupt."""
    import torch

    from dilocox_peer.model.loss import loss_of

    if flags.tasks:
        if flags.data:
            raise ConfigError(f"evaluate {folder}: either --data or --tasks")
        torch.set_num_threads(flags.threads or torch.get_num_threads())
        return run_tasks(folder, flags)
    if not flags.data:
        raise ConfigError(f"evaluate {folder}: name the text to evaluate on with --data, or benchmarks with --tasks")
    model = model_in_folder(folder, flags.context)
    tokenizer = tokenizer_in_folder(folder, flags.tokenizer, model.vocab_size)
    torch.set_num_threads(flags.threads or torch.get_num_threads())
    total, tokens, num_bytes = 0.0, 0, 0
    for ids_T in _sequences(flags.data, flags.column, tokenizer, model.context, flags.tokens):
        loss, count = loss_of(model, ids_T[None, :-1], ids_T[None, 1:])
        total, tokens = total + loss, tokens + count
        num_bytes += tokenizer.num_bytes(ids_T[1:].numpy())
    if not tokens:
        raise ConfigError(f"{', '.join(map(str, flags.data))}: no text in it; name files with text in them")
    loss, bits = total / tokens, total / max(num_bytes, 1) / math.log(2)
    if flags.log.is_json:
        typer.echo(plain_json({"loss": loss, "bits_per_byte": bits, "tokens": tokens, "bytes": num_bytes}))
    else:
        typer.echo(
            f"{folder}: {loss:.4f} nats a token, {bits:.4f} bits a byte; {tokens:,} tokens, {num_bytes:,} bytes, sequences of "
            f"{model.context}"
        )


def _sequences(
    paths: Sequence[Path], column: str, tokenizer: "Tokenizer", context: int, most: int
) -> "Iterator[Tensor]":
    """Up to context + 1 tokens of a document at a time, each token but a document's first one once as a target; at most about
    `most` tokens. Raises ConfigError."""
    import numpy as np
    import torch

    from dilocox_peer.data.sources import Reading, documents_of
    from dilocox_peer.data.tokenizer import bounded

    taken = 0
    try:
        for document in documents_of(paths, Reading(column)):
            ids = bounded(tokenizer, tokenizer.encode([document.data.tobytes()])[0]).astype(np.int64)
            for start in range(0, len(ids) - 1, context):
                if taken >= most:
                    return
                part = torch.from_numpy(ids[start : start + context + 1])
                taken += len(part) - 1
                yield part
    except OSError as error:
        raise ConfigError(
            f"{error.filename or paths[0]}: {error.strerror or error}; check that you may read it"
        ) from None
