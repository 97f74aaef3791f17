"""What a peer of stage 0 reads: its tokenizer and its text, as the manifest and the volunteer say."""

from dilocox_peer.data.corpus import Corpus, has_text, load_corpus
from dilocox_peer.data.tokenizer_files import find_tokenizer, has_tokenizer
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.weights import place_of
from dilocox_peer.peer.settings import SessionSettings


def read_corpus(manifest: Manifest, settings: SessionSettings) -> Corpus:
    """Takes as long as the text is; not in an event loop. Raises ConfigError."""
    section, choices = manifest.data, settings.choices
    tokenizer = find_tokenizer(
        section,
        manifest.model.vocab_size,
        given=choices.tokenizer,
        kept=settings.tokenizers,
        beside=place_of(manifest.model, choices.model),
    )
    return load_corpus(section.source, choices.data, validation=section.validation, tokenizer=tokenizer)


def can_read(manifest: Manifest, settings: SessionSettings) -> bool:
    """Whether this peer has what stage 0 needs, as far as can be told without reading it."""
    section, choices = manifest.data, settings.choices
    beside = place_of(manifest.model, choices.model)
    return has_text(section.source, choices.data) and has_tokenizer(
        section, given=choices.tokenizer, kept=settings.tokenizers, beside=beside
    )
