"""The forgeries, one after another, at swarms of real processes: what tests/hostile/test_forks.py asserts of and
benchmarks/attacks.py prints. Each generator owns a swarm and gives an Outcome for each attack."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from tests.hostile.attacked import PATIENCE_S, STRANGER, Attacked, Outcome, attacked_run

HONEST = ("peer0", "peer1", "peer2")
TRAITORS = ("bad0", "bad1")
RECORD_ACTS = 8
AWAY_ROUNDS = 4  # that the others go on while one is stopped

Attacks = AsyncIterator[tuple[Attacked, Outcome]]


async def by_a_stranger(recorded: Path) -> Attacks:
    """Three honest peers, and somebody with the link. recorded: what another run has said (`record`)."""
    async with Attacked(attacked_run(len(HONEST))) as swarm:
        await swarm.start_bootstrap()
        await asyncio.gather(*(swarm.start_peer(label) for label in HONEST[:2]), swarm.start_stranger())

        # At genesis: the run waits for its third peer, and two are shown another beginning.
        swarm.order("genesis")
        await swarm.until(lambda: swarm.acts([STRANGER]) >= 6, swarm.needed(HONEST[:2]), PATIENCE_S)
        await swarm.start_peer(HONEST[2])
        yield swarm, await swarm.attack("genesis", HONEST)

        for mode in ("s2", "past", "impostor"):
            swarm.order(mode, back=2)
            yield swarm, await swarm.attack(mode, HONEST)
        swarm.order("replay", file=str(recorded))
        yield swarm, await swarm.attack("replay", HONEST)

        # At a joiner, whose first acquaintance is the stranger.
        swarm.order("s2")
        [address, *_] = swarm.of(STRANGER, "ForgerReady")[0]["addresses"]
        await swarm.start_peer("joiner", more=("--initial-peers", address))
        yield swarm, await swarm.attack("joiner", (*HONEST, "joiner"))
        swarm.order("rest")
        await _left(swarm, "joiner")

        # A donor that lies: newcomers, each with nothing.
        for lie in ("outline", "bytes"):
            swarm.order("donor", lie=lie)
            acts = swarm.acts([STRANGER])
            await swarm.until(lambda acts=acts: swarm.acts([STRANGER]) >= acts + 3, swarm.needed(HONEST), PATIENCE_S)  # type: ignore[misc]
            label = f"newcomer-{lie}"
            await swarm.start_peer(label)
            yield swarm, await swarm.attack(f"donor ({lie})", (*HONEST, label), concerned=())
            swarm.order("rest")
            await _left(swarm, label)

        # After a partition: one is stopped while the others go on, and comes back to a branch made for it.
        stopped = _family(swarm, HONEST[2])
        for process in stopped:
            process.suspend()
        reached = swarm.round_of(HONEST[0])
        swarm.order("held", victim=swarm.peer_of(HONEST[2]))
        try:
            await swarm.until(
                lambda: min(map(swarm.round_of, HONEST[:2])) >= reached + AWAY_ROUNDS,
                swarm.needed(HONEST[:2]),
                PATIENCE_S,
            )
        finally:
            for process in stopped:
                process.resume()
        yield swarm, await swarm.attack("partition", HONEST, concerned=HONEST[2:])

        # The quorum dies: two of three, at once.
        swarm.order("s2")
        for label in HONEST[1:]:
            swarm.children[label].process.kill()
        yield swarm, await swarm.attack("quorum died", HONEST[:1], rounds=3)


async def by_members() -> Attacks:
    """Members that forge with their own votes: one and two of five, then two of four. The first of the roster is honest."""
    async with _with_traitors(HONEST) as swarm:
        for mode, traitors in (("one vote", TRAITORS[:1]), ("minority", TRAITORS)):
            async for outcome in _forging(swarm, mode, HONEST, traitors):
                yield swarm, outcome
    async with _with_traitors(HONEST[:2]) as swarm:
        async for outcome in _forging(swarm, "equal", HONEST[:2], TRAITORS):
            yield swarm, outcome


@asynccontextmanager
async def _with_traitors(honest: Sequence[str]) -> AsyncIterator[Attacked]:
    """A run of these and the traitors, who are honest as yet."""
    async with Attacked(attacked_run(len(honest) + len(TRAITORS))) as swarm:
        swarm.order_keys([*honest, *TRAITORS])
        await swarm.start_bootstrap()
        traitors = (swarm.start_traitor(label, TRAITORS) for label in TRAITORS)
        await asyncio.gather(*map(swarm.start_peer, honest), *traitors)
        everybody = swarm.needed([*honest, *TRAITORS])
        await swarm.until(lambda: min(map(swarm.round_of, honest)) >= 3, everybody, PATIENCE_S)
        yield swarm


async def _forging(
    swarm: Attacked, mode: str, honest: Sequence[str], traitors: Sequence[str]
) -> AsyncIterator[Outcome]:
    for back in (0, 1, 2):
        for label in traitors:
            swarm.order_traitor(label, traitors, back=back)
        yield await swarm.attack(f"{mode}, {back} back", honest, traitors)


async def record(path: Path) -> None:
    """What another run of the same settings and the same owner says, but for its seed: its messages, certificates and
    the owner's checkpoint."""
    async with Attacked(attacked_run(1, run={"seed": 8})) as swarm:
        await swarm.start_bootstrap()
        await asyncio.gather(swarm.start_peer("peer0"), swarm.start_stranger())
        swarm.order("record", file=str(path))
        await swarm.until(
            lambda: swarm.acts([STRANGER]) >= RECORD_ACTS and swarm.round_of("peer0") >= 4 and path.exists(),
            swarm.needed(["peer0", STRANGER]),
            PATIENCE_S,
        )


async def _left(swarm: Attacked, label: str) -> None:
    child = swarm.children[label]
    assert child.process.stdin is not None
    child.process.stdin.close()
    await child.process.wait()


def _family(swarm: Attacked, label: str) -> list[psutil.Process]:
    process = psutil.Process(swarm.children[label].process.pid)
    return [process, *process.children(recursive=True)]


async def collect(attacks: Attacks, on_outcome: Callable[[Attacked, Outcome], None]) -> list[Outcome]:
    """All outcomes; each is told as it comes."""
    found = []
    async for swarm, outcome in attacks:
        on_outcome(swarm, outcome)
        found.append(outcome)
    return found
