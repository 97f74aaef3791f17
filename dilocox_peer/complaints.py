"""What pydantic says of settings that do not fit, as one line for people."""

import json

from pydantic import ValidationError


def first_error(error: ValidationError) -> str:
    """The first of pydantic's complaints as 'field: reason (got ...)'."""
    first = error.errors(include_url=False)[0]
    loc = [part for index, part in enumerate(first["loc"]) if index != 1 or part not in ("llama", "transformers")]
    where = ".".join(str(part) for part in loc) or "the file"
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown field"
    try:
        got = json.dumps(first["input"], default=str)
    except ValueError:  # of a number of thousands of digits, which Python writes no more than it reads
        got = ""
    shown = "" if not 0 < len(got) <= 60 or first["type"] == "missing" else f" (got {got})"
    reason = first["msg"].removeprefix("Value error, ")
    return f"{where}: {reason[:1].lower()}{reason[1:]}{shown}"
