"""The peers that the run's link names have every record, and are asked for it too.

A record lies at the few nodes whose ids are nearest to its key, and an id is the hash of a public key: five that are nearer than any honest
one are found in a tenth of a second. They would take what is written, keep none of it, and hide a stage, or the run, from everybody. Whoever
has the link trusts the peers in it to be led in, so these are written to and asked beside the nearest; and everybody holds its own records.

How often they are asked grows with what lies under the keys, as the answers of a few of them would fill their lines, but for as
long as they tell of peers that the nearest do not. In between what they told stands, until it expires.

They are written to and asked beside the walk to the nearest, never after it: a few nodes that answer late make a walk as long as they like.
Nothing here imports hivemind; its nodes are known by their fields.
"""

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dilocox_peer.dht.entry import MAX_ASKED_KEYS, Record
from dilocox_peer.types import PeerId

MOST_ASKED = 3  # of the peers that a link names; one drawn at a time to read
ASKED_AGAIN_S, MOST_S = 20.0, 120.0  # the latter is longer than a lease lives
RECORD_S = 0.2  # longer for each record that they told
ASK_S = 4.0
MAX_KEYS = 1024  # the longest unasked is forgotten

Records = dict[PeerId, tuple[bytes, float]]
"""writer -> (record, when it expires)."""


StoreAnswers = list[bool] | None
"""What a node answered to a store; None: nothing."""


@dataclass(slots=True)
class Stored:
    """What other nodes answered to a store. calls: by peer, shared by two that write the same record, so that nobody is sent it twice."""

    calls: dict[str, asyncio.Task[StoreAnswers]] = field(default_factory=dict)
    answers: list[bool] = field(default_factory=list)

    async def ask(self, peer: str, call: Callable[[], Coroutine[Any, Any, StoreAnswers]]) -> StoreAnswers:
        """The answer to a call, made unless it was made already."""
        if peer not in self.calls:
            self.calls[peer] = asyncio.create_task(call())
        taken = await self.calls[peer]
        self.answers += taken or []
        return taken


@dataclass(slots=True)
class _Told:
    records: Records
    again_at: float


class NamedPeers:
    """node: a DHTNode. named: the peers that the link names, now. validator: takes the signature off a record."""

    def __init__(
        self,
        node: Any,
        named: Callable[[], Collection[PeerId]],
        validator: Any,
        clock: Callable[[], float],
        rng: random.Random | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: wall clock, by which records expire. now: of the pace."""
        self._node = node
        self._named = named
        self._validator = validator
        self._clock = clock
        self._rng = rng or random.Random()
        self._now = now
        self._told: OrderedDict[str, _Told] = OrderedDict()

    # -- writing ------------------------------------------------------------------------------------------------------

    async def store(self, key: str, raw: bytes, expires_s: float, writer: PeerId, stored: Stored) -> bool:
        """Writes writer's record, signed, at all of them, and keeps it here; whether it did that."""
        protocol, key_id, subkey = self._node.protocol, self._id_of(key), str(writer)
        record = Record(key_id.to_bytes(), protocol.serializer.dumps(subkey), protocol.serializer.dumps(raw), expires_s)
        record = replace(record, value=self._validator.sign_value(record))
        is_kept = self._validator.validate(record) and protocol.storage.store_subkey(
            key_id, subkey, record.value, expires_s
        )
        call = {"keys": [key_id], "values": [record.value], "expiration_time": [expires_s], "subkeys": [subkey]}
        asked = (stored.ask(str(peer), partial(protocol.call_store, peer, **call)) for peer in self._here())
        await asyncio.gather(*asked)
        return bool(is_kept)

    # -- reading ------------------------------------------------------------------------------------------------------

    async def find(self, keys: Sequence[str], timeout_s: float = ASK_S) -> dict[str, Records]:
        """What they tell of these keys, now or a while ago; a key of which nobody tells is left out. Takes at most ASK_S: the nearest may have
        answered where these are gone."""
        now = self._now()
        due = [key for key in keys if key not in self._told or self._told[key].again_at <= now]
        if due and (peers := self._here()):
            with suppress(TimeoutError):
                async with asyncio.timeout(min(timeout_s, ASK_S)):
                    for peer in self._rng.sample(peers, len(peers)):
                        if await self._ask(peer, due):
                            break
        alive, found = self._clock(), dict[str, Records]()
        for key in keys:
            if (told := self._told.get(key)) is not None:
                records = {peer: each for peer, each in told.records.items() if each[1] > alive}
                if records or told.again_at > now:
                    found[key] = records
        return found

    def others_found(self, key: str, found: Collection[PeerId]) -> None:
        """found: the writers that the nearest nodes tell of. Where the named ones told of more they are asked again soon."""
        told = self._told.get(key)
        alive = self._clock()
        if told is not None and any(each[1] > alive and peer not in found for peer, each in told.records.items()):
            told.again_at = min(told.again_at, self._now() + ASKED_AGAIN_S)

    async def _ask(self, peer: Any, keys: Sequence[str]) -> bool:
        for first in range(0, len(keys), MAX_ASKED_KEYS):
            part = {self._id_of(key): key for key in keys[first : first + MAX_ASKED_KEYS]}
            answer = await self._node.protocol.call_find(peer, list(part))
            if answer is None:
                return False
            for key_id, key in part.items():
                value, _nearest = answer.get(key_id, (None, {}))
                records = {} if value is None else self.records(key_id, value.value)
                wait_s = min(ASKED_AGAIN_S + RECORD_S * len(records), MOST_S)
                self._told[key] = _Told(records, self._now() + wait_s * self._rng.uniform(0.8, 1.2))
                self._told.move_to_end(key)
            while len(self._told) > MAX_KEYS:
                self._told.popitem(last=False)
        return True

    def records(self, key_id: Any, dictionary: Any) -> Records:
        """The records in a dictionary of hivemind's, without their signatures."""
        if isinstance(dictionary, bytes):
            return {}
        serializer, found = self._node.protocol.serializer, Records()
        for subkey, (value, expires_s) in dictionary.items():
            record = Record(key_id.to_bytes(), serializer.dumps(subkey), value, expires_s)
            with suppress(ValueError):
                found[PeerId(subkey)] = (serializer.loads(self._validator.strip_value(record)), expires_s)
        return found

    def _here(self) -> list[Any]:
        """Those in our routing table, which whoever does not answer drops out of and is greeted back into."""
        wanted = {str(peer) for peer in self._named()}
        here = [peer for peer in self._node.protocol.routing_table.uid_to_peer_id.values() if str(peer) in wanted]
        return here[:MOST_ASKED]

    def _id_of(self, key: str) -> Any:
        return type(self._node.node_id).generate(source=key)


def merged(*found: Mapping[str, Records]) -> dict[str, Records]:
    """Of each writer the record that expires last."""
    together: dict[str, Records] = {}
    for each in found:
        for key, records in each.items():
            mine = together.setdefault(key, {})
            for peer, record in records.items():
                if peer not in mine or mine[peer][1] < record[1]:
                    mine[peer] = record
    return together
