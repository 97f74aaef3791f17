"""JSON as its standard has it (RFC 8259): it knows neither NaN nor infinities, and most programs refuse a line with one."""

import json
import math
from typing import Any


def plain_json(value: Any) -> str:
    """Of what json can write; null where a number is not finite."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
