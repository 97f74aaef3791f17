"""Text drawn from a run's newest round, for its page: after a piece of held-out text, now and then, as the machine allows."""

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from dilocox_peer.events_of_data import TextSampled

if TYPE_CHECKING:
    from dilocox_peer.data.tokenizer import Tokenizer
    from dilocox_peer.model.architecture import StageModel

PROMPT_TOKENS, TOKENS = 32, 128
DRAW_S = 20.0  # at most; what has come by then is shown
EVERY_S, REST = 60.0, 20.0  # between two, and times as long as the last one took
SEED = 1  # one seed and one prompt: what differs from round to round is the model
MAX_CHARS = 1000


def harmless(text: str) -> str:
    """text without what could move a terminal's cursor or worse: who trained a model may have taught it that."""
    return "".join(character if character.isprintable() or character in "\n\t" else "�" for character in text)


class RunSampler:
    """`sample` after a round was evaluated; None: it is not time yet. clock: seconds that do not go back."""

    def __init__(self, tokenizer: "Tokenizer", clock: Callable[[], float] = time.monotonic) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self._next_at = float("-inf")

    def is_due(self) -> bool:
        return self._clock() >= self._next_at

    def sample(self, model: "StageModel", batches: Iterable[tuple[Any, Any]], number: int) -> TextSampled | None:
        """batches: of held-out text, of which the first sequence begins the prompt. model: whole, of round `number`."""
        from dilocox_peer.model.sampling import Sampling, continuation

        first = next(iter(batches), None)
        if first is None:
            return None
        began = self._clock()
        ids = first[0][0][:PROMPT_TOKENS].tolist()
        # Where a document begins its id is negative (data/held_out.py): what follows is another one, or nothing.
        end = next((place for place in range(1, len(ids)) if ids[place] < 0), len(ids))
        prompt = [id_ if id_ >= 0 else ~id_ for id_ in ids[:end]]
        stream = continuation(
            model, prompt, Sampling(), num_tokens=TOKENS, num_ids=self._tokenizer.vocab_size, seed=SEED,
            last=self._tokenizer.eos,
        )  # fmt: skip
        drawn: list[str] = []
        for piece in self._tokenizer.text_of(stream):
            drawn.append(piece)
            if self._clock() - began > DRAW_S:
                break
        took = self._clock() - began
        self._next_at = self._clock() + max(EVERY_S, REST * took)
        said = "".join(self._tokenizer.text_of(iter(prompt)))
        return TextSampled(number, harmless(said)[-MAX_CHARS:], harmless("".join(drawn))[:MAX_CHARS])
