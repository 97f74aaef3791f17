"""Memory that goes back to the system before its process ends, and before the last who holds it lets go of it.

A process that ends gives its pages back one after another, in one thread of the system's: 0.2 s a GB, so that of a peer with 13 GB it took
longer than all the rest of its leaving. While it leaves there are goodbyes to wait for, and processors that have nothing to do by then.

A vector that is freed while the process goes on takes as long, in one call that holds the lock of the address space (munmap, mmap_lock): any thread
that maps or unmaps something waits for all of it, the event loop too. By the piece nobody waits for more than one.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

LEAST_BYTES = 16 << 20  # of a vector: what is smaller goes fast enough
_PART_BYTES = 64 << 20
_PIECE_BYTES = 8 << 20  # given back in one call while others are at work: 1.5 ms
_MAX_THREADS = 8


def give_back(vectors: Iterable[Tensor]) -> int:
    """Bytes whose memory the system has back: those of large vectors (CPU, contiguous), which read as zeros from here on, so nobody may use them
    any more. None where the system is not Linux. Does not hold the GIL for long; call it from a worker thread."""
    advise = _library_call() if sys.platform == "linux" else None
    if advise is None:
        return 0
    parts = {part for vector in vectors for part in _parts(vector, _PART_BYTES)}
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="dilocox-leaving") as pool:
        given = list(pool.map(lambda part: 0 if advise(*part, mmap.MADV_DONTNEED) else part[1], sorted(parts)))
    return sum(given)


def give_back_by_piece(vector: Tensor) -> int:
    """Bytes whose memory the system has back, piece by piece: of a large vector that the caller alone holds and is about to let go of while others are
    at work; it reads as zeros from here on. None of what is not torch's own memory (a file's, numpy's, a card's), of a part of a vector, of memory that a card's driver reads, and
    where the system is not Linux. Does not hold the GIL."""
    advise = _library_call() if sys.platform == "linux" else None
    if advise is None or not _is_whole(vector):
        return 0
    return sum(0 if advise(*part, mmap.MADV_DONTNEED) else part[1] for part in _parts(vector, _PIECE_BYTES))


def _is_whole(vector: Tensor) -> bool:
    """Whether it is all of what torch allocated for it, in the machine's memory."""
    if vector.device.type != "cpu" or vector.is_pinned():
        return False
    storage = vector.untyped_storage()
    return storage.resizable() and storage.nbytes() == vector.numel() * vector.element_size()


def _parts(vector: Tensor, part_bytes: int) -> list[tuple[int, int]]:
    """(address, bytes) of the whole pages in it, so many bytes at a time."""
    size_bytes = vector.numel() * vector.element_size()
    if vector.device.type != "cpu" or size_bytes < LEAST_BYTES or not vector.is_contiguous():
        return []
    first = -(-vector.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (vector.data_ptr() + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    return [(start, min(part_bytes, last - start)) for start in range(first, last, part_bytes)]


def _library_call() -> Callable[..., int] | None:
    """madvise(2), which the standard library has for its own mappings alone."""
    try:
        found: Callable[..., int] = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]  # type: ignore[attr-defined]
    return found
