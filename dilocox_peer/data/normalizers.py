"""What a tokenizer.json may make of a text before it cuts it: a run's owner writes it, and every volunteer reads texts through it."""

import json
from typing import Any

MAX_GROWTH = 64.0
"""Characters of one. Published ones come to 2: they put a mark before a text, and one character in the place of another."""


def growth_of(normalizer: Any) -> float:
    """The most characters that a `tokenizers.normalizers.Normalizer` makes of one, but for the tables of Unicode (18 at most). None has no bound by itself:
    forty that write each `a` twice make a terabyte of it."""
    longest = 1.0
    for step in _steps(json.loads(normalizer.__getstate__())):
        if step.get("type") == "Replace":
            # An expression may match nothing, between any two characters.
            replaced = step["pattern"].get("String") or ""
            content = len(step["content"])
            longest *= max(1.0, content / len(replaced)) if replaced else 1.0 + content
        elif step.get("type") == "Prepend":
            longest += len(step["prepend"])
    return longest


def _steps(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step.get("type") != "Sequence":
        return [step]
    return [inner for each in step["normalizers"] for inner in _steps(each)]
