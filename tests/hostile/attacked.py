"""A swarm under attack: real peers, a real attacker, and what is asked of the honest ones afterwards."""

import asyncio
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilocox_peer.cli.children import Child
from dilocox_peer.config import preset
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.control import ask, socket_path
from dilocox_peer.peer.identity import Identity, encode_key, read_key
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import sha256
from tests.swarm.watched import Watched

PATIENCE_S = 600.0  # of a wait: the machine may be busy with others
NAMED_S = 60.0  # after that, in which each names the attackers whom they have shown something
ROUNDS = 4  # that are to be certified while an attack lasts
ACTS = 6  # times that an attacker shows what it has
NAMING = ("MessageRefused", "StateFetchFailed", "EquivocationProved", "MemberDoubted")
STRANGER = "stranger"
OWNER_SEED = sha256(b"the owner of all attacked runs")


def attacked_run(start_peers: int, **sections: Any) -> Manifest:
    """A run that is not over soon, and short to forge to its end."""
    rounds = {"total": 1000, "inner_steps": 16, "start_peers": start_peers, **sections.pop("rounds", {})}
    return preset("tiny", rounds=rounds, **sections)


@dataclass(frozen=True)
class Outcome:
    """Of one attack, at the honest peers. moved: those that gave up something certified. named: those whose log names an
    attacker; in_status: whose status does. reasons: what was said of it."""

    mode: str
    seconds: float
    shown: int
    first_round: int
    last_round: int
    moved: tuple[str, ...]
    named: tuple[str, ...]
    in_status: tuple[str, ...]
    reasons: frozenset[str]
    loss_before: float
    loss_after: float
    honest: tuple[str, ...]

    def row(self) -> str:
        return (
            f"{self.mode:20} {self.seconds:6.0f} s  shown {self.shown:4}  rounds {self.first_round:4} -> {self.last_round:4}  "
            f"moved {len(self.moved)}  named {len(self.named)}, in status {len(self.in_status)} of {len(self.honest)}  "
            f"loss {self.loss_before:.3f} -> {self.loss_after:.3f}"
        )


class Attacked(Watched):
    """`attack` again and again."""

    def __init__(self, manifest: Manifest) -> None:
        """All such runs have one owner."""
        super().__init__(manifest)
        path = self.folder / "owner.key"
        path.write_bytes(encode_key(OWNER_SEED))
        self.manifest = manifest.signed_by(SigningKey(OWNER_SEED))

    # ---- who is there ----

    def peer_of(self, label: str) -> str:
        found = self.of(label, "PeerStarted") or self.of(label, "ForgerReady")
        return str(found[-1]["peer"])

    def order_keys(self, labels: Sequence[str]) -> None:
        """Makes the keys of these peers before they start: their PeerIDs, and so their places in the first roster, are in
        this order."""
        folder = self.folder / "keys"
        keys = []
        for number in range(len(labels)):
            with Identity.open(folder / str(number)) as identity:
                keys.append((identity.peer_id, identity.path))
        for label, (_, path) in zip(labels, sorted(keys), strict=True):
            target = self.key_of(label)
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.rename(target)

    def key_of(self, label: str) -> Path:
        return self.folder / "peers" / label / "identity.key"

    async def start_stranger(self, label: str = STRANGER, link: str = "") -> Child:
        program = ("-m", "tests.hostile.forger")
        child = await self.children.start(
            label, [link or self.link, "--home", str(self.folder / label)], program=program
        )
        await self.until(lambda: self.of(label, "ForgerReady") != [], [child], PATIENCE_S)
        return child

    async def start_traitor(self, label: str, traitors: Sequence[str]) -> Child:
        """traitors: all of them, whose keys are made (`order_keys`)."""
        accomplices = ",".join(read_key(self.key_of(each), flag="keys").peer_id for each in traitors)
        program = ("-m", "tests.hostile.traitor", str(self.orders_of(label)), accomplices)
        return await self.start_peer(label, program=program)

    def orders_of(self, label: str) -> Path:
        return self.folder / f"{label}.orders"

    def order(self, mode: str, label: str = STRANGER, **more: Any) -> None:
        stdin = self.children[label].process.stdin
        assert stdin is not None
        stdin.write(json.dumps({"mode": mode, **more}).encode() + b"\n")

    def order_traitor(self, label: str, keys: Sequence[str], *, back: int) -> None:
        """To forge with the keys of these members."""
        text = json.dumps({"keys": [str(self.key_of(each)) for each in keys], "back": back})
        new = self.orders_of(label).with_suffix(".new")
        new.write_text(text)
        new.replace(self.orders_of(label))

    # ---- what is seen ----

    def acts(self, attackers: Sequence[str]) -> int:
        return sum(len(self.of(label, "ForgerActed")) + len(self.of(label, "TraitorActed")) for label in attackers)

    def loss(self, labels: Sequence[str], upto: int) -> float:
        """In training, of the five rounds up to this one."""
        rounds = (each for label in labels for each in self.of(label, "RoundCertified"))
        rows = [each["train_loss"] for each in rounds if upto - 5 < each["round"] <= upto]
        rows = [each for each in rows if each is not None and each == each]
        return statistics.mean(rows) if rows else float("nan")

    async def status_of(self, label: str) -> dict[str, Any]:
        answer = await ask(socket_path(self.folder / "peers" / label), "status")
        found: dict[str, Any] = answer["status"]
        return found

    def needed(self, labels: Sequence[str]) -> list[Child]:
        return [self.children[label] for label in labels]

    async def attack(
        self,
        mode: str,
        honest: Sequence[str],
        attackers: Sequence[str] = (STRANGER,),
        *,
        concerned: Sequence[str] | None = None,
        rounds: int = ROUNDS,
        acts: int = ACTS,
    ) -> Outcome:
        """Watches until the attackers have acted, rounds have gone on, and those concerned (None: all honest ones) have named them, or had
        NAMED_S for it; the order is given before."""
        loop = asyncio.get_running_loop()
        began, seen, acted = loop.time(), {label: len(self.events[label]) for label in honest}, self.acts(attackers)
        first = max(map(self.round_of, honest))
        await self.until(
            lambda: self.acts(attackers) >= acted + acts
            and min(map(self.round_of, honest)) >= first + rounds,
            self.needed([*honest, *attackers]), PATIENCE_S,
        )  # fmt: skip
        hostile = {self.peer_of(label) for label in attackers}
        with suppress(TimeoutError):
            await self.until(
                lambda: all(
                    any(map(_is_naming(hostile), self.events[label][seen[label] :]))
                    for label in (honest if concerned is None else concerned)
                ),
                self.needed([*honest, *attackers]), NAMED_S,
            )  # fmt: skip
        return await self.outcome(mode, honest, attackers, seen, began, first, self.acts(attackers) - acted)

    async def outcome(
        self,
        mode: str,
        honest: Sequence[str],
        attackers: Sequence[str],
        seen: dict[str, int],
        began: float,
        first: int,
        shown: int,
    ) -> Outcome:
        hostile = {self.peer_of(label) for label in attackers}
        news = {label: self.events[label][seen[label] :] for label in honest}
        said = {label: list(filter(_is_naming(hostile), news[label])) for label in honest}
        in_status = []
        for label in honest:
            status = await self.status_of(label)
            if hostile & {each["peer"] for each in (*status["doubted"], *status["refused"])}:
                in_status.append(label)
        last = max(map(self.round_of, honest))
        return Outcome(
            mode,
            asyncio.get_running_loop().time() - began,
            shown,
            first,
            last,
            tuple(label for label in honest if any(map(_is_a_move, news[label]))),
            tuple(label for label in honest if said[label]),
            tuple(in_status),
            frozenset(f"{each['event']}: {each['reason']}" for label in honest for each in said[label]),
            self.loss(honest, first),
            self.loss(honest, last),
            tuple(honest),
        )

    def forks(self, honest: Sequence[str]) -> dict[int, set[str]]:
        """Rounds for which honest peers, at any time, have had different heads."""
        heads: dict[int, set[str]] = defaultdict(set)
        for label in honest:
            for each in self.of(label, "RoundCertified"):
                heads[each["round"]].add(each["head"])
        return {number: each for number, each in heads.items() if len(each) > 1}


def _is_naming(hostile: Collection[str]) -> Callable[[dict[str, Any]], bool]:
    return lambda record: record["event"] in NAMING and _whom(record) in hostile


def _whom(record: dict[str, Any]) -> str:
    return str(record["donor"] if record["event"] == "StateFetchFailed" else record["peer"])


def _is_a_move(record: dict[str, Any]) -> bool:
    """Whether a peer gave up rounds that it had; a peer that catches up gives up none."""
    return record["event"] == "BranchSwitched" and bool(record["ancestor_round"] < record["old_round"])
