"""A newcomer to a run of many rounds: `python benchmarks/long_chain.py [--rounds 20000 100000] [--members 4] [--checkpoint 0.999]`.

The round machines of a member and of a newcomer, as they run in a peer, with real keys, signatures and encoded messages, and the newcomer's
log on a real disk; each newcomer is a process of its own, no network is waited for. It begins at genesis, hears a member's heartbeat, asks for
its chain page by page, and then for the state at its end. Then it is started again from its log; and last a member certifies that many
rounds, one after the other, into a log. Printed: what went to and fro, processor time in the machine and in decoding, the longest single
input (the event loop waits as long), that of writing the log, what lies on the disk, and resident memory at the start and at its most.
Expected: time in proportion to the rounds, memory that hardly grows.
"""

import argparse
import gc
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
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
    Persist,
    Received,
    Send,
    StateComputed,
    StateInstalled,
)
from dilocox_peer.peer.rounds.durable import Durable, Votes
from dilocox_peer.peer.rounds.genesis import genesis_of
from dilocox_peer.peer.rounds.journal import Journal
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.timing import Timing
from dilocox_peer.signing import SigningKey, verify
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Entry, Report, Value, acceptance
from dilocox_peer.wire.checkpoints import Checkpoint, sign_checkpoint
from dilocox_peer.wire.rounds import GetChain, Heartbeat, decode_message, encode_message

OWNER = SigningKey(bytes(32))
ME = SigningKey(b"m" * 32)
CALL_S = 60.0  # of the machines' time, after which the newcomer has given up


def chain_of(rounds: int, keys: list[SigningKey]) -> list[Certificate]:
    by_peer = {key.peer_id: key for key in keys}
    return list(certificates_of(rounds, sorted(by_peer), lambda peer: by_peer.get(peer, OWNER).sign))


def certificates_of(
    rounds: int, roster: Sequence[PeerId], sign_as: Callable[[PeerId], Callable[[bytes], bytes]] | None = None
) -> Iterator[Certificate]:
    """sign_as: whose signatures; None: bytes as many."""
    manifest = manifest_of(rounds)
    place = genesis_of(manifest, 0)
    planner, roster = FixedPlanner(plan_bounds(manifest)), tuple(roster)
    quorum = roster[: len(roster) // 2 + 1]

    def certified(value: Value, view: int, signers: Sequence[PeerId]) -> Certificate:
        message = acceptance(0, place.head, view, 0, value)
        signs = {peer: (lambda _: bytes(64)) if sign_as is None else sign_as(peer) for peer in signers}
        votes = tuple((peer, vote_for(message, place.height + 1, sign)) for peer, sign in signs.items())
        return Certificate(0, place.head, view, 0, value, votes)

    certificate = certified(place.view_change(roster), 1, [OWNER.peer_id])
    yield certificate
    for number in range(rounds):
        place = place.then(certificate)
        digest = sha256(b"state", number.to_bytes(4, "big"))
        entries = [
            Entry(peer, 1, sha256(peer.encode(), number.to_bytes(4, "big")), 100_000, 64, digest, Report(closed_ms=1))
            for peer in roster
        ]
        certificate = certified(place.round_value(entries, roster, planner.next(place.plan)), place.view, quorum)
        yield certificate


def manifest_of(rounds: int) -> Manifest:
    return preset("tiny", rounds={"total": rounds + 100, "inner_steps": 4}).signed_by(OWNER)


def machine(
    rounds: int, key: SigningKey, journal: Journal | None, certificates: Sequence[Certificate] = ()
) -> RoundMachine:
    """With a log: of what that says."""
    manifest = manifest_of(rounds)
    durable = Durable(0, certificates, Votes(certificates[-1].head)) if certificates else None
    if journal is not None:
        durable = journal.loaded.durable
    return RoundMachine(
        me=key.peer_id, incarnation=1, stage=0, genesis=manifest.genesis(0), timing=Timing(), sign=key.sign, verify=verify,
        rng=random.Random(0), now=0.0, plan=first_plan(manifest), start_peers=1, max_peers=64, plans=plan_bounds(manifest),
        run_owner=OWNER.peer_id, max_back=manifest.rounds.checkpoint_every, durable=durable,
        chain=None if journal is None else journal.chain,
        stored_states=[certificates[-1].head] if certificates else [manifest.genesis(0)],
    )  # fmt: skip


@dataclass
class Joined:
    """Of the newcomer's process. seconds: processor time in the machine and in decoding. journal_s: in writing its log."""

    seconds: float = 0.0
    longest_s: float = 0.0
    journal_s: float = 0.0
    wall_s: float = 0.0
    messages: int = 0
    size_bytes: int = 0
    began_mb: float = 0.0
    most_mb: float = 0.0
    log_bytes: int = 0
    past_bytes: int = 0
    head: bytes = b""


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def most_mb() -> float:
    """Of this process alone: getrusage also counts what it was before it ran this program."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024 / 1e6


def newcomer(
    donor: Connection, folder: Path, rounds: int, beat: bytes, word: Checkpoint | None, donor_id: PeerId
) -> None:
    """Joins, in a process of its own; sends lists of questions, gets lists of replies, and says at last what it took."""
    gc.freeze()  # as a peer after its start
    found, now = Joined(began_mb=resident_mb()), 0.0
    journal = Journal(folder / "rounds.log", genesis_of(manifest_of(rounds), 0))
    joining = machine(rounds, ME, journal)
    began, tip = time.monotonic(), decode_message(beat, donor_id).head
    asked: list[bytes] = []
    wanted: FetchState | None = None

    def give(happened: Input | bytes) -> None:
        nonlocal wanted
        began = time.thread_time()
        if isinstance(happened, bytes):
            happened = Received(donor_id, decode_message(happened, donor_id))
        actions: list[Action] = joining.handle(happened, now)
        took_s = time.thread_time() - began
        found.seconds += took_s
        found.longest_s = max(found.longest_s, took_s)
        for action in actions:
            match action:
                case Send(to, message) if to == donor_id and isinstance(message, GetChain):
                    asked.append(encode_message(message))
                case Persist(durable):
                    began = time.thread_time()
                    if blocks := journal.write(durable):
                        joining.history.seal(blocks)
                    found.journal_s += time.thread_time() - began
                case FetchState():
                    wanted = action
                case _:
                    pass

    give(StateComputed(joining.head, b"s" * 32))
    if word is not None:
        give(OwnerVouched(word))
    give(PeerFound(donor_id))
    give(beat)
    while wanted is None or wanted.head != tip:
        now += 0.05
        assert now < CALL_S + rounds / 8, "it is not in"
        if not asked:
            give(beat)
            give(Tick())
        donor.send(asked)
        asked.clear()
        for reply in donor.recv():
            found.messages += 1
            found.size_bytes += len(reply)
            give(reply)
    give(StateInstalled(tip, b"d" * 32))
    assert joining.head == tip
    found.wall_s, found.most_mb, found.head = time.monotonic() - began, most_mb(), joining.head
    found.log_bytes, found.past_bytes = (
        (folder / name).stat().st_size if (folder / name).exists() else 0 for name in ("rounds.log", "rounds.past")
    )
    journal.close()
    donor.send(found)


def restarted(out: Connection, folder: Path, rounds: int) -> None:
    """Opens the log that the newcomer left."""
    gc.freeze()  # as a peer after its start
    found, began, began_wall = Joined(began_mb=resident_mb()), time.thread_time(), time.monotonic()
    journal = Journal(folder / "rounds.log", genesis_of(manifest_of(rounds), 0))
    again = machine(rounds, ME, journal)
    found.seconds, found.wall_s = time.thread_time() - began, time.monotonic() - began_wall
    found.most_mb, found.head = most_mb(), again.head
    journal.close()
    out.send(found)


def stayed(out: Connection, folder: Path, rounds: int, members: int) -> None:
    """A member's chain and log, certificate by certificate. Signatures are of no key: nothing here looks at them."""
    gc.freeze()  # as a peer after its start
    genesis = genesis_of(manifest_of(rounds), 0)
    journal = Journal(folder / "rounds.log", genesis)
    chain, found, began = journal.chain, Joined(), time.monotonic()
    for number, certificate in enumerate(
        certificates_of(rounds, [PeerId(f"12D3KooWmember{number:038d}") for number in range(members)])
    ):
        started = time.thread_time()
        chain.append(certificate)
        if blocks := journal.write(Durable(chain.height - 1, (certificate,), Votes(chain.head))):
            chain.seal(blocks)
        found.longest_s = max(found.longest_s, time.thread_time() - started)
        if number == min(2000, rounds // 2):
            found.began_mb = resident_mb()
    found.most_mb, found.wall_s = resident_mb(), time.monotonic() - began
    found.log_bytes, found.past_bytes = ((folder / name).stat().st_size for name in ("rounds.log", "rounds.past"))
    journal.close()
    out.send(found)


def in_a_process(
    target: Callable[..., None], *arguments: object, answer: Callable[[list[bytes]], list[bytes]] | None = None
) -> Joined:
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there, *arguments))
    process.start()
    there.close()
    while not isinstance(said := here.recv(), Joined):
        assert answer is not None, "nothing was to be asked"
        here.send(answer(said))
    process.join()
    return said


def join(folder: Path, rounds: int, members: int, checkpoint: float) -> tuple[Joined, Joined]:
    """(a newcomer's, and its next start). checkpoint: the share of the chain that the owner has vouched for; 0: none of it."""
    keys = [SigningKey(bytes([number + 1]) * 32) for number in range(members)]
    certificates = chain_of(rounds, keys)
    donor, tip, word = machine(rounds, keys[0], None, certificates), certificates[-1], None
    if height := int(checkpoint * len(certificates)):
        place = certificates[height - 1]
        unsigned = Checkpoint(0, manifest_of(rounds).genesis(0), height, place.value.round, place.head, 1, False)
        word = sign_checkpoint(unsigned, OWNER.sign)
    beat = Heartbeat(
        0, tip.head, tip.view, incarnation=1, height=tip.value.height, round=tip.value.round, weight=tip.value.weight,
        training_round=tip.value.round + 1, micro_batches=0, ready=True, state_digest=b"d" * 32, paused=False,
    )  # fmt: skip
    now = 0.0

    def answer(questions: list[bytes]) -> list[bytes]:
        nonlocal now
        now += 0.05
        asked = [Received(ME.peer_id, decode_message(raw, ME.peer_id)) for raw in questions]
        sent = [each for question in asked for each in donor.handle(question, now) if isinstance(each, Send)]
        return [
            encode_message(each.message)
            for each in sent
            if each.to == ME.peer_id and not isinstance(each.message, Heartbeat)
        ]

    joined = in_a_process(newcomer, folder, rounds, encode_message(beat), word, keys[0].peer_id, answer=answer)
    again = in_a_process(restarted, folder, rounds)
    assert again.head == joined.head == tip.head
    return joined, again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, nargs="+", default=[2000, 20_000, 100_000])
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument(
        "--checkpoint", type=float, default=0.999, help="share of the chain that the run's owner has signed"
    )
    arguments = parser.parse_args()
    header()
    print(
        f"# {arguments.members} members, the owner's word on {arguments.checkpoint:.1%} of the chain; MB: resident, at the start > most"
    )
    print(
        "rounds   pages  MB read   CPU s  us a round  longest input, ms  log CPU s  log MB  past MB        MB     again: s        MB"
    )
    for rounds in arguments.rounds:
        with tempfile.TemporaryDirectory() as folder:
            one, again = join(Path(folder), rounds, arguments.members, arguments.checkpoint)
        print(
            f"{rounds:6d}  {one.messages:6d}  {one.size_bytes / 1e6:7.1f}  {one.seconds:6.2f}  {1e6 * one.seconds / rounds:10.0f}"
            f"  {1000 * one.longest_s:17.1f}  {one.journal_s:9.2f}  {one.log_bytes / 1e6:6.1f}  {one.past_bytes / 1e6:7.1f}"
            f"  {one.began_mb:3.0f} > {one.most_mb:3.0f}  {again.seconds:11.2f}  {again.began_mb:3.0f} > {again.most_mb:3.0f}",
            flush=True,
        )
    print("rounds of a member   MB after 2,000   MB at the end   log MB   past MB   longest certificate, ms")
    for rounds in arguments.rounds:
        with tempfile.TemporaryDirectory() as folder:
            one = in_a_process(stayed, Path(folder), rounds, arguments.members)
        print(
            f"{rounds:18d}  {one.began_mb:15.0f}  {one.most_mb:14.0f}  {one.log_bytes / 1e6:7.1f}  {one.past_bytes / 1e6:8.1f}"
            f"  {1000 * one.longest_s:24.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
