"""`generate`: text from the newest agreed model, as it is drawn."""

import os
import secrets
import sys
from typing import TYPE_CHECKING

from dilocox_peer.cli.flags import GenerateFlags
from dilocox_peer.cli.model_folder import model_in_folder, tokenizer_in_folder
from dilocox_peer.cli.sampling_of_run import harmless
from dilocox_peer.cli.source import load_model, source_of, tokenizer_of
from dilocox_peer.errors import ConfigError

if TYPE_CHECKING:
    from dilocox_peer.data.tokenizer import Tokenizer

ONE_THREAD_PARAMETERS = 20_000_000


def run_generate(flags: GenerateFlags) -> None:
    """Writes prompt and continuation to standard output. Raises what load_model raises."""
    source = source_of(flags.source, exported=flags.model)
    from dilocox_peer.model.huggingface import is_of_published
    from dilocox_peer.model.merging import merge
    from dilocox_peer.model.sampling import Sampling, continuation
    from dilocox_peer.peer.device import chosen_device

    device = chosen_device(flags.device)
    try:
        sampling = Sampling(flags.temperature, flags.top_k)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if flags.model is not None and is_of_published(flags.model):
        model = model_in_folder(flags.model, None, device=device)
        tokenizer = tokenizer_in_folder(flags.model, flags.tokenizer, model.vocab_size)
        _use_threads(flags.threads, model.flat_N.numel())
    else:
        whole = merge(load_model(source), flags.base)
        tokenizer = tokenizer_of(whole, flags.source, given=flags.tokenizer, exported=flags.model or flags.base)
        _use_threads(flags.threads, whole.num_parameters)
        model = whole.build(device=device)
    seed = secrets.randbits(31) if flags.seed is None else flags.seed
    prompt = os.fsencode(flags.prompt)  # the bytes that were typed, whatever they are
    ids = prompt_ids(tokenizer, prompt)
    num_tokens, num_ids = flags.tokens, tokenizer.vocab_size
    stream = continuation(model, ids, sampling, num_tokens=num_tokens, num_ids=num_ids, seed=seed, last=tokenizer.eos)
    is_terminal = sys.stdout.isatty()
    _write(prompt.decode(errors="replace"))
    for text in tokenizer.text_of(stream):
        _write(harmless(text) if is_terminal else text)
    _write("\n")


def prompt_ids(tokenizer: "Tokenizer", prompt: bytes) -> list[int]:
    """The prompt as the beginning of a document. Where nothing stands before one, an empty prompt is a new line: a model needs
    something to go on from."""
    ids = tokenizer.encode([prompt])[0].tolist()
    first = tokenizer.eos if tokenizer.bos is None else tokenizer.bos  # the last of the document before, in training
    return [*([] if first is None else [first]), *ids] or tokenizer.encode([b"\n"])[0].tolist()


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
