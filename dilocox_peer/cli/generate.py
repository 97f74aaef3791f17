"""`generate`: text from the newest agreed model, as it is drawn."""

import os
import secrets
import sys
from dataclasses import dataclass

from dilocox_peer.cli.source import SourceRequest, load_model
from dilocox_peer.errors import ConfigError

ONE_THREAD_PARAMETERS = 20_000_000


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """The flags. tokens: bytes to draw. seed: None for another text each time."""

    prompt: str
    source: SourceRequest
    tokens: int
    temperature: float
    top_k: int
    seed: int | None
    device: str
    threads: int | None


def run_generate(request: GenerateRequest) -> None:
    """Writes prompt and continuation to standard output. Raises what load_model raises."""
    from dilocox_peer.model.sampling import Sampling, as_text, continuation

    try:
        sampling = Sampling(request.temperature, request.top_k)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    whole = load_model(request.source)
    _use_threads(request.threads, whole.num_parameters)
    try:
        model = whole.build(device=request.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {request.device} cannot be used here ({reason}): use --device cpu") from None
    seed = secrets.randbits(31) if request.seed is None else request.seed
    prompt = os.fsencode(request.prompt)  # the bytes that were typed, whatever they are
    stream = continuation(model, prompt, sampling, num_bytes=request.tokens, seed=seed)
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
