"""`generate`: text from the newest agreed model, as it is drawn."""

import os
import secrets
import sys

from dilocox_peer.cli.flags import GenerateFlags
from dilocox_peer.cli.source import load_model
from dilocox_peer.errors import ConfigError

ONE_THREAD_PARAMETERS = 20_000_000


def run_generate(flags: GenerateFlags) -> None:
    """Writes prompt and continuation to standard output. Raises what load_model raises."""
    from dilocox_peer.model.sampling import Sampling, as_text, continuation

    try:
        sampling = Sampling(flags.temperature, flags.top_k)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    whole = load_model(flags.source, exported=flags.model)
    _use_threads(flags.threads, whole.num_parameters)
    try:
        model = whole.build(device=flags.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {flags.device} cannot be used here ({reason}): use --device cpu") from None
    seed = secrets.randbits(31) if flags.seed is None else flags.seed
    prompt = os.fsencode(flags.prompt)  # the bytes that were typed, whatever they are
    stream = continuation(model, prompt, sampling, num_bytes=flags.tokens, seed=seed)
    is_terminal = sys.stdout.isatty()
    _write(prompt.decode(errors="replace"))
    for text in as_text(stream):
        _write(harmless(text) if is_terminal else text)
    _write("\n")


def harmless(text: str) -> str:
    """text without what could move a terminal's cursor or worse: who trained a model may have taught it that."""
    return "".join(character if character.isprintable() or character in "\n\t" else "�" for character in text)


def _use_threads(threads: int | None, num_parameters: int) -> None:
    """torch's own choice is all cores; for a small model their meeting costs more than they bring: 75 ms a byte instead
    of 1.8 with 0.25 M parameters on a busy machine."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    elif num_parameters < ONE_THREAD_PARAMETERS:
        torch.set_num_threads(1)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
