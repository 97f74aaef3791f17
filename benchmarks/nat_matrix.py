"""How the peers of homes of all kinds are connected, pair by pair: directly, through a hole in both routers, or by a relay.

    python benchmarks/nat_matrix.py                   all kinds
    python benchmarks/nat_matrix.py a b s             these homes alone
    python benchmarks/nat_matrix.py a b f --watch 400 so long, whether anything changes or not: which relayed ones become direct, and when

Real p2pds and what the peer does around them (network/, peer/reaching.py), in network namespaces with the kernel's NAT, one bootstrap
that is the only relay: needs root, iproute2 and nftables. Nothing is trained.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from swarm import header
from testbed.natlab import NatLab, Router, missing

KINDS = {
    "a": "restricted",
    "b": "restricted",
    "j": "restricted, answers with a reset",
    "f": "full cone",
    "s": "symmetric",
    "t": "symmetric",
    "c": "restricted behind a carrier's restricted NAT",
    "d": "restricted behind a carrier's symmetric NAT",
    "e": "lets out port 443 alone",
    "p": "a public host",
    "v": "IPv6 alone, behind a firewall",
}
SETTLE_S = 75.0
QUIET_S = 25.0  # without a change: it has settled, relayed ones that can be direct have been made anew
LACKS = 77
NAT_PEER = Path(__file__).parent / "testbed" / "nat_peer.py"


def homes(lab: NatLab, names: Sequence[str]) -> None:
    lab.public("boot", 9, ipv6=True)
    lab.carrier("isp", 50, Router.RESTRICTED)
    lab.carrier("isq", 51, Router.SYMMETRIC)
    for name in names:
        number = ord(name) - ord("a") + 1
        match name:
            case "s" | "t":
                lab.home(name, number, Router.SYMMETRIC)
            case "j":
                lab.home(name, number, Router.REJECTS)
            case "f":
                lab.home(name, number, Router.FULL_CONE)
            case "c":
                lab.home(name, number, behind="isp")
            case "d":
                lab.home(name, number, behind="isq")
            case "e":
                lab.home(name, number, only_port=443)
            case "v":
                lab.home(name, number, ipv4=False, ipv6=True)
            case "p":
                lab.public(name, 20)
            case _:
                lab.home(name, number, Router.RESTRICTED)


@dataclass
class Matrix:
    """pairs: "a b" -> how they are connected; "cut off" where they are not. reach: home -> what it says of itself."""

    names: list[str]
    pairs: dict[str, str] = field(default_factory=dict)
    reach: dict[str, str] = field(default_factory=dict)
    settled_s: float = 0.0
    changes: list[tuple[float, str, str]] = field(
        default_factory=list
    )  # (s since all are there, pair, how it is from then on)

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(self.pairs.values()))


class Told:
    """What a peer tells last."""

    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None
        self.last: dict[str, Any] = {}
        self.changed_at = time.monotonic()

    async def read(self, said: asyncio.StreamReader) -> None:
        while line := await said.readline():
            try:
                new = json.loads(line)
            except ValueError:
                continue
            if new != self.last:
                self.last, self.changed_at = new, time.monotonic()


async def start(lab: NatLab, name: str, folder: Path, *more: str) -> Told:
    command = lab.command(name, ["env", "OMP_NUM_THREADS=1", sys.executable, NAT_PEER, folder / name, *more])
    told = Told()
    told.process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, limit=1 << 20
    )
    assert told.process.stdout is not None
    reading = asyncio.create_task(told.read(told.process.stdout))
    told.process.reading = reading  # type: ignore[attr-defined]
    began = time.monotonic()
    while not told.last:
        if told.process.returncode is not None or time.monotonic() - began > 90:
            raise RuntimeError(f"{name} did not start")
        await asyncio.sleep(0.1)
    return told


def paths(peers: dict[str, Told], names: Sequence[str]) -> dict[str, str]:
    """ "a b" -> how they are connected now, as either sees it where they differ."""
    found = {}
    for one, other in combinations(names, 2):
        path = peers[one].last["paths"].get(peers[other].last["peer"], "cut off")
        back = peers[other].last["paths"].get(peers[one].last["peer"], "cut off")
        found[f"{one} {other}"] = path if path == back else f"{path}/{back}"
    return found


async def play(names: Sequence[str], watch_s: float | None, delay_ms: float) -> Matrix:
    matrix = Matrix(list(names))
    with NatLab(delay_ms=delay_ms) as lab, tempfile.TemporaryDirectory(prefix="dilocox-matrix-") as folder:
        homes(lab, names)
        lab.start()
        peers: dict[str, Told] = {}
        try:
            where = [
                flag
                for port in (4711, 443)
                for flag in ("--listen", f"/ip4/0.0.0.0/tcp/{port}", "--announce", f"/ip4/31.0.0.9/tcp/{port}")
            ]
            where += ["--listen", "/ip6/::/tcp/4711", "--announce", "/ip6/2a01:100::9/tcp/4711"]
            boot = await start(lab, "boot", Path(folder), "--bootstrap", *where)
            peers["boot"] = boot
            entries = [flag for text in boot.last["addresses"] for flag in ("--entry", text)]
            for name in names:
                peers[name] = await start(lab, name, Path(folder), *entries)
            began = time.monotonic()
            while time.monotonic() - began < (watch_s or SETTLE_S):
                await asyncio.sleep(1.0)
                for pair, path in (now := paths(peers, names)).items():
                    if path != matrix.pairs.get(pair, "cut off"):
                        matrix.changes.append((time.monotonic() - began, pair, path))
                matrix.pairs = now
                all_leases = [
                    {"peer": told.last["peer"], "addresses": told.last["addresses"], "reachability": told.last["reach"]}
                    for name, told in peers.items()
                    if name != "boot"
                ]
                for name in names:
                    process = peers[name].process
                    assert process is not None
                    assert process.stdin is not None
                    process.stdin.write(json.dumps(all_leases).encode() + b"\n")
                last_change = max(peers[name].changed_at for name in names)
                if watch_s is None and time.monotonic() - began > 40 and time.monotonic() - last_change > QUIET_S:
                    break
            matrix.settled_s = max(peers[name].changed_at for name in names) - began
            matrix.pairs = paths(peers, names)
            matrix.reach = {name: peers[name].last["reach"] for name in names}
        finally:
            for told in peers.values():
                if told.process is not None and told.process.stdin is not None:
                    told.process.stdin.close()
            for told in peers.values():
                if told.process is not None:
                    try:
                        async with asyncio.timeout(8):
                            await told.process.wait()
                    except TimeoutError:
                        told.process.kill()
    return matrix


def show(matrix: Matrix) -> None:
    for name in matrix.names:
        print(f"  {name}: {KINDS[name]} ({matrix.reach[name]})")
    print("\n|   | " + " | ".join(matrix.names[1:]) + " |")
    print("|---|" + "---|" * (len(matrix.names) - 1))
    for index, one in enumerate(matrix.names[:-1]):
        cells = [
            matrix.pairs[f"{one} {other}"] if other in matrix.names[index + 1 :] else "" for other in matrix.names[1:]
        ]
        print(f"| {one} | " + " | ".join(cells) + " |")
    direct = sum(
        num for how, num in matrix.counts.items() if how in ("direct", "punched", "direct/punched", "punched/direct")
    )
    print(
        f"\n{direct} of {len(matrix.pairs)} pairs directly; {matrix.counts}; nothing changed after {matrix.settled_s:.0f} s"
    )


def main() -> int:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("homes", nargs="*", metavar="HOME", default=list(KINDS), help=f"of {' '.join(KINDS)}; all of them")
    cli.add_argument("--json", action="store_true", help="the same once more, as the last line")
    cli.add_argument("--watch", type=float, help="seconds")
    cli.add_argument("--delay", type=float, default=0.0, help="ms, one way, of each of a packet's two links")
    args = cli.parse_args()
    # Choices of argparse would be asked of the default as well, which is a list: none of them.
    if unknown := sorted(set(args.homes) - KINDS.keys()):
        cli.error(f"no such home: {' '.join(unknown)}")
    if (lack := missing()) is not None:
        print(f"skipped: {lack}", file=sys.stderr)
        return LACKS
    print(header())
    matrix = asyncio.run(play(args.homes, args.watch, args.delay))
    show(matrix)
    if args.watch is not None:
        for at_s, pair, path in matrix.changes:
            print(f"  {at_s:5.0f} s  {pair}: {path}")
    if args.json:
        print(json.dumps({"pairs": matrix.pairs, "reach": matrix.reach, "settled_s": matrix.settled_s}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
