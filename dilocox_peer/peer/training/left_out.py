"""Micro-batches of which nothing finite came here, from data of our own, though the parameters are finite: they are left out, for a while. Pure.

A forward in float16 may come to values beyond 65,504 for a single odd token. That must neither end a peer nor go to a neighbour, which would refuse
it and the link; but one that comes to nothing else trains nothing, and is told what to do instead.
"""

MOST_IN_A_ROW = 16


class LeftOutInARow:
    """How many were left out since one was of use."""

    def __init__(self, precision: str) -> None:
        self._precision = precision
        self._in_a_row = 0

    def one(self, reason: str) -> None:
        """One more. Raises FloatingPointError where they are too many in a row."""
        self._in_a_row += 1
        if self._in_a_row < MOST_IN_A_ROW:
            return
        told = f"{reason}, {self._in_a_row} times in a row in --precision {self._precision}"
        if self._precision == "float16":
            told += ", which holds nothing beyond 65,504: use --precision bfloat16 or float32"
        raise FloatingPointError(told)

    def of_use(self) -> None:
        """One was."""
        self._in_a_row = 0
