"""The peers of several stages, as far as the directory tells of them."""

import asyncio
from collections.abc import Iterable

from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import RunUnreachable


async def leases_of_stages(directory: Directory, stages: Iterable[int]) -> dict[int, list[Lease]]:
    """All of them are asked for at once; one of which nobody tells in time is left out. Raises RunUnreachable where that is so of all."""
    asked = list(stages)
    answers = await asyncio.gather(*(directory.peers(stage) for stage in asked), return_exceptions=True)
    found, failed = dict[int, list[Lease]](), list[RunUnreachable]()
    for stage, answer in zip(asked, answers, strict=True):
        if isinstance(answer, RunUnreachable):
            failed.append(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found[stage] = answer
    if failed and not found:
        raise failed[0]
    return found
