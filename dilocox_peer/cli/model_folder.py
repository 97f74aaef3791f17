"""A model that lies in a folder, of any decoder that transformers knows, with its tokenizer: what `evaluate FOLDER` and `generate --model` read."""

from pathlib import Path
from typing import TYPE_CHECKING

from dilocox_peer.errors import ConfigError
from dilocox_peer.manifest import NUM_BYTES

if TYPE_CHECKING:
    from dilocox_peer.data.tokenizer import Tokenizer
    from dilocox_peer.model.architecture import StageModel

USUAL_CONTEXT = 1024


def model_in_folder(folder: Path, context: int | None, *, device: str = "cpu") -> "StageModel":
    """Of any decoder that transformers knows, with its weights; sequences of the model's own length, at most 1,024 where context is
    None. Raises ConfigError."""
    from dilocox_peer.model.adapters import PEFT_FILES
    from dilocox_peer.model.architecture import LayerRange
    from dilocox_peer.model.published import PublishedStage, design_from, design_layout
    from dilocox_peer.model.weights import CONFIG, open_folder

    if (folder / PEFT_FILES[0]).is_file() and not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} holds adapters alone: name a folder that `export` without --adapter wrote")
    opened = open_folder(folder)
    design = design_from(opened.config_json, num_stages=1, context=USUAL_CONTEXT)
    most = getattr(design.config, "max_position_embeddings", None) or USUAL_CONTEXT
    if context is not None and context > most:
        raise ConfigError(f"--context {context}: the model's sequences have at most {most} tokens")
    design = design_from(opened.config_json, num_stages=1, context=context or min(most, USUAL_CONTEXT))
    layers = LayerRange(0, design.config.num_hidden_layers - 1, is_first_stage=True, is_last_stage=True)
    layout = design_layout(design, layers)
    opened.check_shapes(design, {spec.name: spec.shape for spec in layout.tensors})
    model = PublishedStage(design, layers, device=device)
    opened.stage_parameters(design, layout, into=model.flat_N)
    return model


def tokenizer_in_folder(folder: Path, given: Path | None, vocab_size: int) -> "Tokenizer":
    """Given, or the one in the folder; bytes where there is none and the vocabulary is theirs. Raises ConfigError."""
    from dilocox_peer.data.tokenizer import BYTE_TOKENIZER, FILE_NAME, JsonTokenizer
    from dilocox_peer.data.tokenizer_files import bounds_beside, read_tokenizer_file

    if given is None and not (folder / FILE_NAME).is_file():
        if vocab_size == NUM_BYTES:
            return BYTE_TOKENIZER
        raise ConfigError(f"{folder} holds no {FILE_NAME}: name the model's with --tokenizer")
    place = given or folder
    content = read_tokenizer_file(place)
    bos, eos = bounds_beside(place, content)
    found = JsonTokenizer(content, bos=bos, eos=eos, source=str(place))
    if found.vocab_size > vocab_size:
        raise ConfigError(f"{place} has {found.vocab_size:,} tokens, the model's vocabulary {vocab_size:,}")
    return found
