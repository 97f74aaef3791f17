"""A tokenizer.json as published ones are (byte-level BPE with special tokens), trained on the spot: no network, no asset."""

import json
from functools import cache
from pathlib import Path

BOS, EOS = "<|begin|>", "<|end|>"

_TEXT = """def main(argument: int) -> None: return the value of the argument and the value of the other one.
A peer trains its copy of a stage; the others train theirs, and what they have learned is averaged in rounds. é 日本 🙂
"""


@cache
def bpe_file(vocab_size: int = 320) -> bytes:
    """The content of a tokenizer.json whose last two of vocab_size tokens are special."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 3, trainer)
    tokenizer.add_special_tokens([BOS, EOS])
    return tokenizer.to_str().encode()


def write_model_folder(folder: Path, **config: object) -> Path:
    """tokenizer.json with its tokenizer_config.json, as in a published model's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(bpe_file())
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": EOS, **config}))
    return folder
