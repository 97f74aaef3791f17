"""Chains between peers of different stages: serving ours and those of kept copies, fetching another's, verified before it is used.

A request names a stage and what is wanted of it: `summary` (of how long a chain, and which state) or `chain` (the certificates
after a locator, a page of them). States are things of the store (peer/state/statesync.py).
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import ProtocolError
from dilocox_peer.network.bulk import PeerSilent, Reply
from dilocox_peer.network.transport import Transport
from dilocox_peer.peer.state.backup import MAX_PAGE_BYTES, Annals, page_after
from dilocox_peer.types import DIGEST_BYTES, Digest, PeerId
from dilocox_peer.wire.chain import Certificate, decode_chain, encode_chain
from dilocox_peer.wire.rounds import MAX_LOCATOR

BACKUP_SERVICE = "backup"
CHAIN_TIMEOUT_S = 600.0
MAX_KEEPERS = 6  # asked; anybody may say that it is one
NOTHING = Reply({}, [])


@dataclass(frozen=True, slots=True)
class Kept:
    """A copy that lies on this disk. round: of its state, 0 without one. reached: that the contributions beside it lead to."""

    annals: Annals
    round: int
    reached: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """What a peer says that it has of a stage: of use for choosing whom to ask, and believed no further.

    height: of the chain. round, weight: of the state that goes with it. reached: the round that it is brought to with contributions
    that are there too.
    """

    height: int
    round: int
    weight: int
    reached: int


def trusted_first(
    keepers: Sequence[Lease], transport: Transport, rng: random.Random, most: int = MAX_KEEPERS
) -> list[Lease]:
    """Whom to ask of those who say that they keep the run: those that the run's link names, then any; ourselves never."""
    others = [lease for lease in keepers if lease.peer != transport.peer_id]
    return sorted(rng.sample(others, len(others)), key=lambda lease: lease.peer not in transport.named)[:most]


class BackupServer:
    """Answers for its own stage with what the rounds have certified, for others with what is kept of them."""

    def __init__(
        self,
        stage: int | None,
        *,
        certificates: Callable[[], Sequence[Certificate]],
        kept: Mapping[int, Kept],
        on_newer: Callable[[int, bool], None] = lambda _stage, _is_member: None,
    ) -> None:
        """stage: that it trains, with these certificates; None: none. on_newer(stage, whether it is of the newest
        roster here): who asks says that it has a newer round than is kept."""
        self._on_newer = on_newer
        self._stage = stage
        self._certificates = certificates
        self._kept = kept

    async def serve(self, peer: PeerId, header: dict[str, Any]) -> Reply:
        """An empty reply for a stage of which nothing is here."""
        match header:
            case {"stage": int(stage), "want": "summary"}:
                if (
                    type(newer := header.get("round")) is int
                    and (kept := self._kept.get(stage))
                    and newer > kept.reached
                ):
                    self._on_newer(stage, peer in kept.annals.place.roster)
                return self._summary(stage)
            case {"stage": int(stage), "want": "chain", "locator": list(heads)} if _is_locator(heads):
                return await self._chain(stage, [Digest(head) for head in heads])
            case _:
                raise ProtocolError(peer, "a request that names no stage, or not what is wanted of it")

    def _known(self, stage: int) -> Sequence[Certificate]:
        if stage == self._stage:
            return self._certificates()
        kept = self._kept.get(stage)
        return kept.annals.certificates if kept is not None else ()

    def _summary(self, stage: int) -> Reply:
        certificates = self._known(stage)
        if not certificates:
            return NOTHING
        newest, kept = certificates[-1].value, self._kept.get(stage)
        number = newest.round if kept is None else kept.round
        reached = number if kept is None else max(number, kept.reached)
        return Reply({"height": newest.height, "round": number, "weight": newest.weight, "reached": reached}, [])

    async def _chain(self, stage: int, heads: Sequence[Digest]) -> Reply:
        certificates = self._known(stage)
        page = page_after(certificates, heads)
        more = bool(page) and page[-1].value.height < certificates[-1].value.height
        return Reply({"more": more}, [await asyncio.to_thread(encode_chain, page)])


def _is_locator(heads: list[object]) -> bool:
    return len(heads) <= MAX_LOCATOR and all(type(head) is bytes and len(head) == DIGEST_BYTES for head in heads)


async def fetch_summary(
    transport: Transport, peer: PeerId, stage: int, timeout_s: float, *, own_round: int = 0
) -> Summary | None:
    """What peer says that it has of stage; None: nothing. own_round: that we have; a keeper which lacks it comes for it. Raises
    PeerUnavailable, ProtocolError."""
    request = {"stage": stage, "want": "summary", "round": own_round}
    header, _ = await transport.fetch(peer, BACKUP_SERVICE, request, max_body_bytes=0, timeout_s=timeout_s)
    match header:
        case {"height": int(height), "round": int(number), "weight": int(weight), "reached": int(reached)}:
            return Summary(height, number, weight, reached)
        case _:
            return None


async def fetch_chain(transport: Transport, peer: PeerId, annals: Annals, timeout_s: float = CHAIN_TIMEOUT_S) -> Digest:
    """Brings annals up to what peer has of its stage, as far as that is believed; where its last page ends. Raises PeerUnavailable,
    ProtocolError; what verified until then stays."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while (left_s := deadline - asyncio.get_running_loop().time()) > 0:
        request = {"stage": annals.stage, "want": "chain", "locator": annals.locator()[:MAX_LOCATOR]}
        header, body = await transport.fetch(
            peer, BACKUP_SERVICE, request, max_body_bytes=MAX_PAGE_BYTES, timeout_s=left_s
        )
        height = annals.place.height
        page = await asyncio.to_thread(decode_chain, body, MAX_PAGE_BYTES, peer)
        await asyncio.to_thread(annals.check, page, peer)
        annals.adopt(page, peer, asyncio.get_running_loop().time())
        is_taken = annals.place.height > height and annals.holds(page[-1].head)  # else it is not believed by now
        if header.get("more") is not True or not is_taken:
            return page[-1].head if page else annals.place.head  # it has nothing that we lack
    raise PeerSilent(peer, f"its chain was not complete within {timeout_s:g} s")
