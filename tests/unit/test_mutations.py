"""What the fuzzer of live swarms sends reaches what lies behind the decoders: some of it is whole, in the versions that peers speak now."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

PROGRAM = """
import struct
from contextlib import suppress
from typing import get_args

from mutations import SERVICES, Mutations

from dilocox_peer.errors import DilocoxError
from dilocox_peer.network.daemon import raw_peer
from dilocox_peer.network.frames import PREFIX_BYTES, unpack_header, unpack_prefix
from dilocox_peer.network.message_frames import HEAD_BYTES, read_head
from dilocox_peer.network.message_packing import Unpacker
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import RunId
from dilocox_peer.wire.rounds import Message, decode_message

TIMES = 1500
key = SigningKey(bytes(range(32)))
mutations = Mutations(1, RunId("5c" * 32), key, raw_peer(key.peer_id))


def batch():
    _, raw, _ = mutations.batch()
    head = read_head(raw[:HEAD_BYTES])
    return Unpacker().unpack(head, raw[HEAD_BYTES : HEAD_BYTES + head.num_packed])


def framed(service):
    raw = mutations.fetch_request(service)
    prefix = unpack_prefix(raw[:PREFIX_BYTES], max_body_bytes=0)
    return unpack_header(raw[PREFIX_BYTES : PREFIX_BYTES + prefix.header_bytes])


def whole(read):
    found = []
    for _ in range(TIMES):
        with suppress(DilocoxError, ValueError, struct.error):
            found.append(read())
    return found


decoded = whole(lambda: decode_message(mutations.message(), key.peer_id))
assert {type(each) for each in decoded} == set(get_args(Message)), "not all kinds of messages"
counts = {"message": len(decoded), "batch": len(whole(batch)), **{each: len(whole(lambda: framed(each))) for each in SERVICES}}
assert all(0.04 * TIMES < count < TIMES for count in counts.values()), counts
print(*SERVICES)
"""


def test_the_fuzzer_speaks_what_peers_speak() -> None:
    """A message of an old version is refused before its kind is looked at, whatever else is wrong with it."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=BENCHMARKS, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stdout == "dial-back state store backup health\n", ran.stdout + ran.stderr
