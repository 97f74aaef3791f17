"""How much memory a peer holds: resident bytes of its process and of the helpers it started (p2pd, linkd)."""

import psutil


def resident_bytes() -> int:
    """Pages that several of them share are counted for each. 0 where the system does not say. Takes milliseconds."""
    try:
        me = psutil.Process()
        family = [me, *me.children(recursive=True)]
    except psutil.Error:
        return 0
    total = 0
    for process in family:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue  # it has ended meanwhile
    return total
