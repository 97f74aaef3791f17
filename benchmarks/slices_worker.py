"""A peer of slices.py that counts what averaging takes: `slices_worker.py FILE join ...`. Not run by hand.

Processor time of the threads that do it, in seconds, added up in FILE (8 bytes): slices that it averages for all, decoding and encoding
included, and the merge into its own anchor.
"""

import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dilocox_peer.__main__ import main
from dilocox_peer.peer.training.outer import OuterOptimizer
from dilocox_peer.peer.training.slice_desk import SliceDesk


class Counted:
    def __init__(self, path: Path) -> None:
        self._file, self._lock, self._total_s = path.open("wb"), threading.Lock(), 0.0
        self._add(0.0)

    def _add(self, seconds: float) -> None:
        with self._lock:
            self._total_s += seconds
            os.pwrite(self._file.fileno(), struct.pack("d", self._total_s), 0)

    def __call__(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*arguments, **named)
            finally:
                self._add(time.thread_time() - began)

        return counted


if __name__ == "__main__":
    counted = Counted(Path(sys.argv.pop(1)))
    SliceDesk.average = counted(SliceDesk.average)  # type: ignore[method-assign]
    OuterOptimizer.merge = counted(OuterOptimizer.merge)  # type: ignore[method-assign]
    main()
