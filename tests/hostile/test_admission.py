"""An invite-only run of real processes: who comes in without an invitation that is good is told so in one line and sent away
with exit code 4; who has one joins with one paste; who speaks the protocol without the program gets nothing; sybils no seat."""

import asyncio
import json
import secrets
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from dilocox_peer.admission import Grant, Right
from dilocox_peer.cli.init import write_whole
from dilocox_peer.cli.local_swarm import LOOPBACK
from dilocox_peer.config import preset, to_toml
from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import RunUnreachable
from dilocox_peer.invitation import format_invitation, parse_invitation
from dilocox_peer.network.bulk import RequestRefused
from dilocox_peer.network.transport import Transport
from dilocox_peer.peer.identity import Identity
from dilocox_peer.signing import SigningKey
from tests.swarm.watched import LONG_S, Watched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

ROUNDS = {"total": 100_000, "inner_steps": 8, "start_peers": 2}
NUM_SYBILS = 30


class InviteOnly(Watched):
    """A swarm whose owner invites with the real command."""

    def __init__(self) -> None:
        super().__init__(preset("tiny", rounds=ROUNDS, admission={"mode": "invite"}))

    @property
    def run_file(self) -> Path:
        return self.folder / "run.toml"

    async def tell(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of the program, run to its end."""
        return await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "dilocox_peer", *arguments, "--home", str(self.folder)],
            capture_output=True, text=True, timeout=LONG_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    async def invite(self, *arguments: str) -> str:
        done = await self.tell("invite", str(self.run_file), "--link", self.link, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    async def sent_away(self, link: str, name: str, *needles: str) -> None:
        """Joining by link ends with one line that has the needles, and exit code 4."""
        done = await self.tell("join", link, "--name", name, "--host-maddrs", LOOPBACK)
        assert done.returncode == 4, (done.returncode, done.stdout, done.stderr)
        assert "started as" not in done.stdout  # no more than the steps of a start
        [line] = done.stderr.splitlines()
        for needle in needles:
            assert needle in line, line

    async def join(self, label: str, link: str) -> None:
        self.link = link
        await self.start_peer(label)


def test_nobody_comes_in_without_an_invitation_that_is_good():
    async def scenario() -> None:
        async with InviteOnly() as swarm:
            await swarm.start_bootstrap()
            plain = swarm.link

            await swarm.sent_away(plain, "none", "takes invited peers only", "link has no invitation")

            of_another = await swarm.invite("--for", SigningKey(b"x" * 32).peer_id)
            await swarm.sent_away(of_another, "another", "the invitation is for another peer")

            expired = _expired(swarm)
            await swarm.sent_away(expired, "late", "the invitation expired on", "ask the run's owner")

            revoked = await swarm.invite("--uses", "5")
            done = await swarm.tell("revoke", str(swarm.run_file), revoked)
            assert done.returncode == 0, done.stderr
            await swarm.sent_away(revoked, "revoked", "the invitation was revoked by the run's owner")

            elsewhere = preset("tiny", run={"name": "elsewhere"}, admission={"mode": "invite"})
            with Identity.open(swarm.folder / "owner.key") as owner:
                elsewhere = elsewhere.signed_by(owner.key)
            other_file = swarm.folder / "other.toml"
            write_whole(other_file, to_toml(elsewhere).encode())
            link = plain.replace(swarm.manifest.run_id, elsewhere.run_id)
            done = await swarm.tell("invite", str(other_file), "--link", link)
            grant = done.stdout.strip().partition("#")[2]
            await swarm.sent_away(f"{plain}#{grant}", "elsewhere", "is for run", "ask the run's owner")

            two = await swarm.invite("--uses", "2")
            for label in ("peer0", "peer1"):
                await swarm.join(label, two)
            await swarm.sent_away(two, "third", "used up: it was for 2 peers", "ask the run's owner")
            peers = [swarm.children["peer0"], swarm.children["peer1"]]
            await swarm.until(lambda: min(map(swarm.round_of, ("peer0", "peer1"))) >= 3, peers, LONG_S)
            assert len(swarm.of("peer0", "RoundCertified")[-1]["contributors"]) == 2

            await _stranger_gets_nothing(swarm, plain)
            await _sybils_get_no_seat(swarm, plain)

            # The same peer comes back by the link without the invitation: it has kept its pass.
            await swarm.tell("leave", "--name", "peer1")
            await peers[1].process.wait()
            await swarm.join("peer1", plain)
            goal = swarm.round_of("peer0") + 3
            await swarm.until(
                lambda: swarm.round_of("peer1") >= goal, [swarm.children["peer0"], swarm.children["peer1"]], LONG_S
            )

    asyncio.run(scenario())


def test_who_is_put_out_is_heard_no_more_and_the_others_go_on():
    async def scenario() -> None:
        async with InviteOnly() as swarm:
            await swarm.start_bootstrap()
            for label in ("peer0", "peer1", "peer2"):
                await swarm.join(label, await swarm.invite())
            peers = [swarm.children[label] for label in ("peer0", "peer1", "peer2")]
            labels = ("peer0", "peer1", "peer2")
            await swarm.until(lambda: min(map(swarm.round_of, labels)) >= 2, peers, LONG_S)
            bad = swarm.of("peer2", "PeerStarted")[-1]["peer"]

            done = await swarm.tell("revoke", str(swarm.run_file), bad, "--link", swarm.link)
            assert done.returncode == 0, done.stderr
            async with asyncio.timeout(240):
                await peers[2].process.wait()  # it reads the list itself
            assert peers[2].process.returncode == 4, list(peers[2].tail)
            assert "this peer was put out by the run's owner" in peers[2].last_words
            await swarm.sent_away(swarm.link, "peer2", "this peer was put out by the run's owner")

            def without_it() -> bool:
                rounds = swarm.of("peer0", "RoundCertified")[-3:]
                return all(bad not in each["contributors"] and len(each["contributors"]) == 2 for each in rounds)

            await swarm.until(without_it, peers[:2], LONG_S)

    asyncio.run(scenario())


def _expired(swarm: InviteOnly) -> str:
    """A link whose invitation ended a minute ago, as the owner signed it before."""
    now = int(time.time())
    with Identity.open(swarm.folder / "owner.key") as owner:
        grant = Grant(
            swarm.manifest.run_id, secrets.token_bytes(16), frozenset({Right.JOIN}), 1000 * now - 10**6, now - 60, None, 3
        ).signed_by(owner.key)  # fmt: skip
    return format_invitation(replace(parse_invitation(swarm.link), grant=grant))


async def _stranger_gets_nothing(swarm: InviteOnly, link: str) -> None:
    """Somebody with the link and the program's own classes: no state, no blob, no chain, no message heard, no lease."""
    async with AsyncExitStack() as stack:
        transport, directory, identity = await _outsider(swarm, link, stack, "stranger")
        members = await directory.peers(0)
        assert len(members) == 2
        for member in members:
            await transport.connect(member.peer, member.addresses)
            for kind in ("state", "store", "backup"):
                with pytest.raises(RequestRefused, match="has shown no invitation"):
                    await transport.fetch(member.peer, kind, {"head": bytes(32)}, max_body_bytes=1 << 20, timeout_s=60)
            with pytest.raises(RequestRefused, match="has shown no invitation"):
                await transport.send(member.peer, b"\x90", 30)
            for shown in (member.admission, b"", secrets.token_bytes(170)):
                with pytest.raises(RequestRefused):
                    await transport.daemon.call(member.peer, transport.pass_protocol, shown, 10)
        for shown in (b"", members[0].admission):
            with pytest.raises(RunUnreachable):
                await directory.announce(_lease(identity, transport, shown))
        assert await _listed(swarm, link) == {member.peer for member in members}


async def _sybils_get_no_seat(swarm: InviteOnly, link: str) -> None:
    """One machine with many keys: every key announces itself and greets; none is in a roster while rounds go by."""
    keys = [SigningKey(bytes([number]) * 32) for number in range(1, NUM_SYBILS + 1)]
    async with AsyncExitStack() as stack:
        transport, directory, _ = await _outsider(swarm, link, stack, "sybils")
        for key in keys:
            directory.key = key
            directory.validator.key = key
            with pytest.raises(RunUnreachable):
                await directory.announce(
                    Lease(
                        peer=key.peer_id, stage=0, incarnation=1, addresses=(), protocol=1, tokens_per_s=1e9,
                        memory_bytes=1, reachability="direct", round=0, admission=b"",
                    )
                )  # fmt: skip
        assert len(await _listed(swarm, link)) == 2
        goal = swarm.round_of("peer0") + 5
        await swarm.until(lambda: swarm.round_of("peer0") >= goal, [swarm.children["peer0"]], LONG_S)
        honest = {swarm.of(label, "PeerStarted")[-1]["peer"] for label in ("peer0", "peer1")}
        assert {each for record in swarm.of("peer0", "RoundCertified") for each in record["contributors"]} <= honest
        assert not transport.is_down


async def _listed(swarm: InviteOnly, link: str) -> set[str]:
    """The peers of the run, as anybody with the program sees them; the liar's own node is there to be asked."""
    done = await swarm.tell("status", link, "--json")
    assert done.returncode == 0, done.stderr
    return {peer["peer"] for stage in json.loads(done.stdout)["stages"] for peer in stage["peers"]}


async def _outsider(
    swarm: InviteOnly, link: str, stack: AsyncExitStack, name: str
) -> tuple[Transport, Directory, Identity]:
    """In the network and the directory of the run, without a pass."""
    folder = swarm.folder / name
    identity = stack.enter_context(Identity.open(folder / "identity.key"))
    invitation = parse_invitation(link)
    transport = await Transport.create(
        identity.path, identity.peer_id, namespace=invitation.run_id, initial_peers=invitation.addresses,
        runtime_dir=folder / "runtime",
    )  # fmt: skip
    stack.push_async_callback(transport.close)
    directory = await Directory.create(transport, invitation.run_id, identity.key)
    stack.push_async_callback(directory.close)
    return transport, directory, identity


def _lease(identity: Identity, transport: Transport, shown: bytes) -> Lease:
    return Lease(
        peer=identity.peer_id, stage=0, incarnation=1, addresses=tuple(transport.addresses), protocol=1,
        tokens_per_s=1e9, memory_bytes=1, reachability="direct", round=0, admission=shown,
    )  # fmt: skip
