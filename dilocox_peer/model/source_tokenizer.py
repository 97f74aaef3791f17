"""Whether a run's tokens are those that the published model which it goes on from was trained on."""

from dilocox_peer.manifest import BYTES, PublishedSection
from dilocox_peer.model.huggingface import json_file, tokenizer_of
from dilocox_peer.types import Digest, sha256

_TOKENIZER_JSON = "tokenizer.json"
_ITS_FILES = frozenset(
    {
        _TOKENIZER_JSON, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
        "tokenizer.model", "chat_template.jinja", "chat_template.json",
    }
)  # fmt: skip


def is_of(file: Digest, tokenizer: str) -> bool:
    """Whether a tokenizer.json of that hash is what a manifest or a catalogue calls `tokenizer`; of bytes it is the one that exports have."""
    return file.hex() == tokenizer or (tokenizer == BYTES and file == sha256(json_file(tokenizer_of())))


def files_of_another(section: PublishedSection, tokenizer: str) -> frozenset[str]:
    """The source's small files that belong to a tokenizer which is not the run's."""
    found = [file.digest for file in section.small_files if file.name == _TOKENIZER_JSON]
    if all(is_of(each, tokenizer) for each in found):
        return frozenset()
    return _ITS_FILES.intersection(file.name for file in section.small_files)
