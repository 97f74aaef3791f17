"""The peers of several stages, where the directory does not tell of each in time."""

from typing import Any, cast

import pytest

from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import RunUnreachable
from dilocox_peer.peer.stage_leases import leases_of_stages
from dilocox_peer.types import PeerId


class LateDirectory:
    def __init__(self, late: set[int]) -> None:
        self._late = late

    async def peers(self, stage: int) -> list[Lease]:
        if stage in self._late:
            raise RunUnreachable("no answer")
        return [Lease(PeerId(f"peer of {stage}"), stage, 1, (), 1, 1.0, 0, "direct", 0)]


async def test_a_stage_of_which_nobody_tells_hides_no_other() -> None:
    found = await leases_of_stages(cast("Any", LateDirectory({1})), range(3))
    assert {stage: [lease.peer for lease in leases] for stage, leases in found.items()} == {
        0: ["peer of 0"],
        2: ["peer of 2"],
    }


async def test_where_nobody_tells_of_any_stage_the_run_is_not_reached() -> None:
    with pytest.raises(RunUnreachable):
        await leases_of_stages(cast("Any", LateDirectory({0, 1})), range(2))
