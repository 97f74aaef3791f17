"""A newcomer to a run of many rounds: `python benchmarks/long_chain.py [--rounds 500 2000 4000] [--members 4] [--checkpoint 0.99]`.

The round machines of a member and of a newcomer, as they run in a peer, with real keys, signatures and encoded messages; time is the
newcomer's thread time, no network is waited for. The newcomer begins at genesis, hears a member's heartbeat, asks for its chain page
by page, and then for the state at its end. Printed: what went to and fro, the newcomer's processor time in its machine and in decoding,
the longest single input (the event loop waits as long), and how much memory its process gained. Expected: time in proportion to
the rounds.
"""

import argparse
import gc
import random
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from swarm import header

from dilocox_peer.config import preset
from dilocox_peer.contract import Tick
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.planning.plan import first_plan, plan_bounds
from dilocox_peer.peer.planning.planner import FixedPlanner
from dilocox_peer.peer.rounds.chain import vote_for
from dilocox_peer.peer.rounds.contract import (
    Action,
    FetchState,
    Input,
    OwnerVouched,
    PeerFound,
    Received,
    Send,
    StateComputed,
    StateInstalled,
)
from dilocox_peer.peer.rounds.durable import Durable, Votes
from dilocox_peer.peer.rounds.genesis import genesis_of
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.timing import Timing
from dilocox_peer.signing import SigningKey, verify
from dilocox_peer.types import sha256
from dilocox_peer.wire.chain import Certificate, Entry, Report, Value, acceptance
from dilocox_peer.wire.checkpoints import Checkpoint, sign_checkpoint
from dilocox_peer.wire.rounds import GetChain, Heartbeat, decode_message, encode_message

OWNER = SigningKey(bytes(32))
ME = SigningKey(b"m" * 32)
CALL_S = 60.0  # of the machines' time, after which the newcomer has given up


def chain_of(rounds: int, keys: list[SigningKey]) -> list[Certificate]:
    manifest = manifest_of(rounds)
    place, certificates = genesis_of(manifest, 0), list[Certificate]()
    planner = FixedPlanner(plan_bounds(manifest))
    roster = tuple(sorted(key.peer_id for key in keys))

    def add(value: Value, view: int, signers: list[SigningKey]) -> None:
        nonlocal place
        message = acceptance(0, place.head, view, 0, value)
        votes = tuple((key.peer_id, vote_for(message, place.height + 1, key.sign)) for key in signers)
        certificates.append(Certificate(0, place.head, view, 0, value, votes))
        place = place.then(certificates[-1])

    add(place.view_change(roster), 1, [OWNER])
    quorum = keys[: len(keys) // 2 + 1]
    for number in range(rounds):
        digest = sha256(b"state", number.to_bytes(4, "big"))
        entries = [
            Entry(peer, 1, sha256(peer.encode(), number.to_bytes(4, "big")), 100_000, 64, digest, Report(closed_ms=1))
            for peer in roster
        ]
        add(place.round_value(entries, roster, planner.next(place.plan)), place.view, quorum)
    return certificates


def manifest_of(rounds: int) -> Manifest:
    return preset("tiny", rounds={"total": rounds + 100, "inner_steps": 4}).signed_by(OWNER)


def machine(rounds: int, key: SigningKey, certificates: list[Certificate]) -> RoundMachine:
    manifest = manifest_of(rounds)
    durable = Durable(0, tuple(certificates), Votes(certificates[-1].head)) if certificates else None
    return RoundMachine(
        me=key.peer_id, incarnation=1, stage=0, genesis=manifest.genesis(0), timing=Timing(), sign=key.sign, verify=verify,
        rng=random.Random(0), now=0.0, plan=first_plan(manifest), start_peers=1, max_peers=64, plans=plan_bounds(manifest),
        run_owner=OWNER.peer_id, max_back=manifest.rounds.checkpoint_every, durable=durable,
        stored_states=[certificates[-1].head] if certificates else [],
    )  # fmt: skip


@dataclass
class Joined:
    seconds: float = 0.0  # processor time, newcomer's
    longest_s: float = 0.0
    messages: int = 0
    size_bytes: int = 0
    gained_mb: float = 0.0


def join(rounds: int, members: int, checkpoint: float) -> Joined:
    """checkpoint: the share of the chain that the owner has vouched for; 0: none of it."""
    keys = [SigningKey(bytes([number + 1]) * 32) for number in range(members)]
    certificates = chain_of(rounds, keys)
    donor, newcomer = machine(rounds, keys[0], certificates), machine(rounds, ME, [])
    donor_id, tip, found, now = keys[0].peer_id, certificates[-1], Joined(), 0.0
    gc.collect()
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    to_donor: list[bytes] = []
    wanted: FetchState | None = None

    def give(happened: Input | bytes) -> None:
        nonlocal wanted
        began = time.thread_time()
        if isinstance(happened, bytes):
            happened = Received(donor_id, decode_message(happened, donor_id))
        actions: list[Action] = newcomer.handle(happened, now)
        took_s = time.thread_time() - began
        found.seconds += took_s
        found.longest_s = max(found.longest_s, took_s)
        for action in actions:
            match action:
                case Send(to, message) if to == donor_id:
                    to_donor.append(encode_message(message))
                case FetchState():
                    wanted = action
                case _:
                    pass

    give(StateComputed(newcomer.head, b"s" * 32))
    if height := int(checkpoint * len(certificates)):
        place = certificates[height - 1]
        word = Checkpoint(0, manifest_of(rounds).genesis(0), height, place.value.round, place.head, 1, False)
        give(OwnerVouched(sign_checkpoint(word, OWNER.sign)))
    give(PeerFound(donor_id))
    beat = Heartbeat(
        0, tip.head, tip.view, incarnation=1, height=tip.value.height, round=tip.value.round, weight=tip.value.weight,
        training_round=tip.value.round + 1, micro_batches=0, ready=True, state_digest=b"d" * 32, paused=False,
    )  # fmt: skip
    give(encode_message(beat))
    while wanted is None or wanted.head != tip.head:
        now += 0.05
        assert now < CALL_S + rounds / 8, "it is not in"
        asked, to_donor = to_donor, []
        if not asked:
            give(encode_message(beat))
            give(Tick())
        for raw in asked:
            message = decode_message(raw, ME.peer_id)
            if not isinstance(message, GetChain):
                continue
            for action in donor.handle(Received(ME.peer_id, message), now):
                if isinstance(action, Send) and action.to == ME.peer_id and not isinstance(action.message, Heartbeat):
                    reply = encode_message(action.message)
                    found.messages += 1
                    found.size_bytes += len(reply)
                    give(reply)
    give(StateInstalled(tip.head, b"d" * 32))
    assert newcomer.head == tip.head
    found.gained_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1024
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, nargs="+", default=[500, 2000, 4000])
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument(
        "--checkpoint", type=float, default=0.99, help="share of the chain that the run's owner has signed"
    )
    arguments = parser.parse_args()
    header()
    print(f"# {arguments.members} members, the owner's word on {arguments.checkpoint:.0%} of the chain")
    print("rounds   pages   MB read   CPU s   us a round   longest input, ms   memory gained, MB")
    for rounds in arguments.rounds:
        one = join(rounds, arguments.members, arguments.checkpoint)
        print(
            f"{rounds:6d}  {one.messages:6d}  {one.size_bytes / 1e6:8.1f}  {one.seconds:6.2f}  {1e6 * one.seconds / rounds:11.0f}"
            f"  {1000 * one.longest_s:18.1f}  {one.gained_mb:18.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
