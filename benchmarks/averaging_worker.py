"""One peer of averaging_faults.py: `averaging_worker.py SYSTEM --index I --elements N --folder F`. Not run by hand.

Commands come as JSON lines on standard input, what happened goes out the same way; when standard input ends, the worker
kills its helpers and ends.

    ours:      "ready" -> meet {peers} -> "formed" -> go -> "accepted" -> "result"
    hivemind:  "imported" -> meet {initial_peers} -> "ready" -> look -> "formed" -> go -> "result"

"formed" says that the group stands and nothing has been sent yet. On our side everything below the conductor is the
peer's own: transport and p2pd, driver, round machine, journal, contributions on disk, codec `none`, aggregate. A harness
stands in for conductor and trainer: it closes round 1 with the vector given, and takes the mean when told to apply.
"""

import argparse
import asyncio
import json
import os
import queue
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

NUM_PEERS = 4
NORM_CLIP = 4.0  # the manifest's default
HIVEMIND_OPTIONS: dict[str, dict[str, float]] = {
    "hivemind": {"min_matchmaking_time": 3.0, "request_timeout": 1.0, "next_chunk_timeout": 3.0, "allreduce_timeout": 40.0},
    "hivemind-default": {},
}  # fmt: skip


def vector_of(index: int, num_elements: int) -> np.ndarray:
    """What peer `index` brings: standard normal float32, the same on every call."""
    return np.random.default_rng(1000 + index).standard_normal(num_elements, dtype=np.float32)


def say(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n")
    sys.stdout.flush()


def listen(take: Callable[[dict[str, Any]], object]) -> None:
    """Hands every command to take, in a thread of its own; when standard input ends, so do this process and its helpers."""

    def read() -> None:
        with os.fdopen(os.dup(0)) as lines:
            for line in lines:
                take(json.loads(line))
        for helper in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                helper.kill()
        os._exit(0)

    threading.Thread(target=read, name="commands", daemon=True).start()


# ---- ours -----------------------------------------------------------------------------------------------------------


async def run_ours(index: int, num_elements: int, folder: Path) -> None:
    import torch

    from dilocox_peer.compression.aggregate import aggregate, contribution_norm
    from dilocox_peer.compression.codec import uniform_policy
    from dilocox_peer.compression.contribution import encode_contribution
    from dilocox_peer.compression.sizes import blob_limits
    from dilocox_peer.network.transport import Transport
    from dilocox_peer.peer.identity import Identity
    from dilocox_peer.peer.planning.plan import PlanBounds
    from dilocox_peer.peer.rounds.chain import Place
    from dilocox_peer.peer.rounds.contract import Apply, Closed, FetchState, PeerFound, StateComputed, StateMissing
    from dilocox_peer.peer.rounds.driver import RoundDriver
    from dilocox_peer.peer.rounds.durable import Durable
    from dilocox_peer.peer.rounds.journal import Journal
    from dilocox_peer.peer.rounds.machine import RoundMachine
    from dilocox_peer.peer.rounds.past import Block
    from dilocox_peer.peer.rounds.timing import Timing
    from dilocox_peer.signing import verify
    from dilocox_peer.store.shelf import Shelf
    from dilocox_peer.store.store import Store
    from dilocox_peer.types import Digest, Layout, PeerId, RunId, sha256
    from dilocox_peer.wire.chain import Entry, Plan

    class WatchedJournal(Journal):
        """Says when this peer has durably accepted a value: its ACK goes out next."""

        def write(self, durable: Durable) -> Sequence[Block]:
            blocks = super().write(durable)
            if durable.votes.accepted is not None:
                say("accepted", ballot=durable.votes.accepted.ballot)
            return blocks

    torch.set_num_threads(1)
    loop = asyncio.get_running_loop()
    home = folder / f"peer{index}"
    layout = Layout.of([("w", (num_elements,))])
    genesis, first_state = sha256(b"averaging faults"), sha256(b"the state before the first round")
    identity = Identity.open(home / "identity.key")
    me, incarnation = identity.peer_id, time.time_ns() // 1_000_000
    disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
    blobs = Shelf(home / "contributions")
    transport = await Transport.create(
        identity.path, me, namespace=RunId(genesis.hex()), runtime_dir=folder / f"run{index}"
    )
    machine = RoundMachine(
        me=me,
        incarnation=incarnation,
        stage=0,
        genesis=genesis,
        timing=Timing(),
        sign=identity.key.sign,
        verify=verify,
        rng=random.Random(f"{me} {incarnation}"),
        now=loop.time(),
        plan=Plan("none", 0, 1),
        start_peers=NUM_PEERS,
        max_peers=2 * NUM_PEERS,
        plans=PlanBounds(total_steps=1),
        stored_states=(genesis,),
    )
    blob = encode_contribution(layout, torch.from_numpy(vector_of(index, num_elements)), uniform_policy("none"))
    digest = blobs.put(blob)
    applies: asyncio.Queue[Apply] = asyncio.Queue()
    formed, told_to_go = asyncio.Event(), asyncio.Event()
    commands: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def on_change() -> None:
        if len(machine.roster) == NUM_PEERS and machine.may_offer and machine.state_digest:
            formed.set()

    async def no_state(action: FetchState) -> None:
        driver.post(StateMissing(action.head))

    def mean_of(action: Apply) -> bytes:
        entries = action.certificate.value.entries
        held = [blobs.get(entry.blob) for entry in entries]
        assert None not in held, "a certificate to apply without its contributions"
        mean = aggregate(
            layout, [each for each in held if each], [entry.micro_batches for entry in entries], norm_clip=NORM_CLIP
        ).mean_N
        return mean.numpy().tobytes() if mean is not None else b""

    def offer_at(head: Digest) -> None:
        driver.post(Closed(head, Entry(me, incarnation, digest, len(blob), 1, first_state)))

    async def apply_all() -> None:
        while True:
            action = await applies.get()
            value = action.certificate.value
            if value.kind == "epoch":
                driver.post(StateComputed(action.certificate.head, first_state))
                if told_to_go.is_set():  # what was offered at the old head is void: close again, as the conductor does
                    offer_at(action.certificate.head)
                continue
            result = await asyncio.to_thread(mean_of, action)
            done_at = time.monotonic()
            driver.post(StateComputed(action.certificate.head, sha256(result)))
            (folder / f"result{index}").write_bytes(result)
            own = "own in" if action.own is not None else "own not in"
            reported = f"certified, {len(value.entries)} contributions, {own}, ballot {action.certificate.ballot}"
            say("result", done_at=done_at, reported=reported, contributors=[entry.peer for entry in value.entries])

    driver = RoundDriver(
        machine,
        transport=transport,
        blobs=blobs,
        journal=WatchedJournal(home / "rounds.log", Place.genesis(0, genesis, Plan("fp16", 0, 1))),
        disk=disk,
        check_blob=lambda _name, raw: contribution_norm(raw, layout),
        max_blob_bytes=blob_limits(layout)[1],
        on_apply=applies.put_nowait,
        on_fetch_state=no_state,
        on_change=on_change,
        listener=lambda event: print(f"{time.monotonic():.3f} {event.line()}", file=sys.stderr, flush=True),
    )

    async def obey() -> None:
        while True:
            command = await commands.get()
            match command["command"]:
                case "meet":
                    for peer, addresses in command["peers"]:
                        if peer != me:
                            await transport.connect(PeerId(peer), addresses)
                            driver.post(PeerFound(PeerId(peer)))
                    await formed.wait()
                    say("formed", leader=machine.leader)
                case "go":
                    told_to_go.set()
                    offer_at(machine.head)

    transport.set_message_handler(driver.receive)
    await Store(transport, [blobs]).serve()
    driver.post(StateComputed(genesis, first_state))
    listen(lambda command: loop.call_soon_threadsafe(commands.put_nowait, command))
    say("ready", peer=me, addresses=transport.addresses)
    async with asyncio.TaskGroup() as tasks:
        for work in (driver.run(), apply_all(), obey()):
            tasks.create_task(work)


# ---- hivemind -------------------------------------------------------------------------------------------------------


def run_hivemind(system: str, index: int, num_elements: int, folder: Path) -> None:
    import torch
    from hivemind import DHT, DecentralizedAverager
    from hivemind.averaging.control import AveragingStage
    from hivemind.p2p import P2P

    torch.set_num_threads(1)
    P2P._UNIX_SOCKET_PREFIX = f"/unix{folder}/"  # it leaves them behind when killed: then in our folder
    commands: queue.Queue[dict[str, Any]] = queue.Queue()
    listen(commands.put)
    say("imported")
    dht = DHT(initial_peers=commands.get()["initial_peers"], start=True)
    tensor = torch.from_numpy(vector_of(index, num_elements))
    averager = DecentralizedAverager(
        [tensor], dht, prefix="faults", target_group_size=NUM_PEERS, start=True, **HIVEMIND_OPTIONS[system]
    )
    say("ready", peer=str(dht.peer_id), addresses=[str(address) for address in dht.get_visible_maddrs()])
    assert commands.get()["command"] == "look"
    began = time.monotonic()
    step = averager.step(gather=index, wait=False, require_trigger=True)
    while step.stage != AveragingStage.AWAITING_TRIGGER:  # it has no other way to tell
        time.sleep(0.005)
    say("formed", matchmaking_s=time.monotonic() - began)
    assert commands.get()["command"] == "go"
    step.allow_allreduce()
    try:
        gathered = step.result()
        outcome = f"ok, {len(gathered)} peers"
    except Exception as error:  # whatever it raises is its report
        outcome = f"failed: {type(error).__name__}"
    done_at = time.monotonic()
    with averager.get_tensors() as tensors:
        (folder / f"result{index}").write_bytes(tensors[0].numpy().tobytes())
    say("result", done_at=done_at, reported=outcome)
    threading.Event().wait()  # until standard input ends: a peer that has its result still serves the others


def warnings_of(log: str) -> list[str]:
    """What hivemind's log admits: shares of results or inputs received."""
    return re.findall(r"received ([\d.]+)% (?:results|of input tensors)", log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=["ours", *HIVEMIND_OPTIONS])
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--elements", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; our standard input ends with it
    if arguments.system == "ours":
        asyncio.run(run_ours(arguments.index, arguments.elements, arguments.folder))
    else:
        run_hivemind(arguments.system, arguments.index, arguments.elements, arguments.folder)


if __name__ == "__main__":
    main()
