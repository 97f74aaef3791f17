"""Which documents are held out: a share, by hash, so that all peers hold out the same. Pure."""

import hashlib
from collections.abc import Sequence

from dilocox_peer.data.tokenizer import Ids

_FEW_DOCUMENTS = 20
"""Below this, a share of the documents chosen by hash is too coarse (it may be empty): blocks of them are chosen."""

_MIN_BLOCK = 2048  # tokens
_MAX_BLOCK = 65536


def split(pieces: Sequence[tuple[str, Ids]], share: float) -> tuple[list[Ids], list[Ids], str]:
    """(training pieces, validation pieces, how) of the documents."""
    total = sum(len(piece) for _, piece in pieces)
    if len(pieces) >= _FEW_DOCUMENTS:
        is_held_out = [hash_fraction(key) < share for key, _ in pieces]
        size = sum(len(piece) for (_, piece), held in zip(pieces, is_held_out, strict=True) if held)
        if 0.25 * share <= size / total <= 0.75:
            train = [piece for (_, piece), held in zip(pieces, is_held_out, strict=True) if not held]
            kept = [piece for (_, piece), held in zip(pieces, is_held_out, strict=True) if held]
            return train, kept, f"{len(kept)} of {len(pieces)} documents"
    block = min(max(total // 256, _MIN_BLOCK), _MAX_BLOCK)
    train, validation = _split_blocks(pieces, share, block)
    return train, validation, f"blocks of {block} tokens, as there are few documents"


def _split_blocks(pieces: Sequence[tuple[str, Ids]], share: float, block: int) -> tuple[list[Ids], list[Ids]]:
    """Training stretches and validation blocks; the block with the lowest hash is always held out."""
    blocks = [
        (hash_fraction(f"{key}:{start // block}"), index, start)
        for index, (key, piece) in enumerate(pieces)
        for start in range(0, len(piece), block)
    ]
    if not blocks:
        return [], []
    lowest = min(blocks)
    train: list[Ids] = []
    validation: list[Ids] = []
    stretch: tuple[int, int, int] | None = None  # (piece, start, stop) of the training text so far
    for fraction, index, start in blocks:
        stop = min(start + block, len(pieces[index][1]))
        is_held_out = fraction < share or (fraction, index, start) == lowest
        if is_held_out:
            validation.append(pieces[index][1][start:stop])
        if stretch and (is_held_out or stretch[0] != index):
            train.append(pieces[stretch[0]][1][stretch[1] : stretch[2]])
            stretch = None
        if not is_held_out:
            stretch = (index, stretch[1] if stretch else start, stop)
    if stretch:
        train.append(pieces[stretch[0]][1][stretch[1] : stretch[2]])
    return train, validation


def hash_fraction(key: str) -> float:
    """In [0, 1), evenly: what is below a share is held out."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
