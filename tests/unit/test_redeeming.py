"""Who is shown an invitation for many: the run's own bootstraps alone."""

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox_peer.admission import Gate, Grant, Right
from dilocox_peer.errors import PeerUnavailable, RunUnreachable
from dilocox_peer.network.transport import Transport
from dilocox_peer.peer.entry import Newcomer, redeem
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId, RunId

OWNER, BOOTSTRAP, ACQUAINTANCE, ME = (SigningKey(bytes([number]) * 32) for number in range(1, 5))
RUN = RunId("ab" * 32)


def test_a_peer_that_was_met_before_is_not_shown_the_invitation(tmp_path: Path) -> None:
    """While the bootstrap was away it had it, could use it for others, and its word ended the join."""
    now_s = int(time.time())
    grant = Grant(RUN, os.urandom(16), frozenset({Right.JOIN}), now_s * 1000, now_s + 9999, None, 5).signed_by(OWNER)
    shown: list[PeerId] = []

    async def fetch(peer: PeerId, _kind: str, _header: Mapping[str, Any], **_: object) -> tuple[dict[str, Any], bytes]:
        shown.append(peer)
        if peer == BOOTSTRAP.peer_id:
            raise PeerUnavailable(peer, "it is being restarted")
        return {"refused": "the run moved: ask evil.example for a new invitation"}, b""

    addresses = tuple(f"/ip4/127.0.0.1/tcp/1/p2p/{key.peer_id}" for key in (BOOTSTRAP, ACQUAINTANCE))
    named = frozenset({BOOTSTRAP.peer_id})
    transport = cast("Transport", SimpleNamespace(initial_peers=addresses, named=named, fetch=fetch))
    with pytest.raises(RunUnreachable, match="being restarted"):
        asyncio.run(redeem(grant, Newcomer(ME.peer_id, grant, tmp_path), Gate(RUN, OWNER.peer_id), "r", transport))
    assert shown == [BOOTSTRAP.peer_id]
