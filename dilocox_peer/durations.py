"""Durations for people. Pure."""


def duration(seconds: float) -> str:
    """Of so many seconds, in the unit that fits."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)):
        if seconds >= 2 * size or size == 1:
            count = int(seconds // size)
            return f"{count} {unit}{'' if count == 1 else 's'}"
    raise AssertionError("seconds are the last unit")
