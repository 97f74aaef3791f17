"""The owner's notaries on real networks: they find the peers, sign, publish, and one that fails takes nobody with it."""

import asyncio
import errno
import os
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dilocox_peer.dht.directory import Directory
from dilocox_peer.errors import RunUnreachable
from dilocox_peer.events import Event, Failed, FirstRosterSigned, MessageRefused, Remark, RoundVouched
from dilocox_peer.network.transport import Transport
from dilocox_peer.peer import registrar as registrar_module
from dilocox_peer.peer.desk import OwnerRecords
from dilocox_peer.peer.dialback import DialbackVerdict
from dilocox_peer.peer.presence import Presence
from dilocox_peer.peer.registrar import Registrar
from dilocox_peer.peer.rounds.chain import Chain
from dilocox_peer.peer.rounds.contract import OwnerSpoke
from dilocox_peer.peer.rounds.durable import Durable, Votes, encode_record
from dilocox_peer.peer.rounds.genesis import genesis_of
from dilocox_peer.peer.rounds.journal import Journal
from dilocox_peer.peer.rounds.notary import Notary
from dilocox_peer.peer.rounds.past import Block
from dilocox_peer.types import PeerId
from dilocox_peer.wire.chain import Certificate
from dilocox_peer.wire.checkpoints import Checkpoint, sign_checkpoint
from dilocox_peer.wire.directives import Directive, sign_directive
from dilocox_peer.wire.rounds import Cert, ChainPage, Directed, GetChain, Vouch, decode_message, encode_message
from tests.certified_stage import KEYS, MANIFEST, OWNER, ROSTER, STAGE, CertifiedStage
from tests.shell.conftest import MakeTransport, until

FIRST, LAST = 0, 1  # the run's two stages


@dataclass
class Player:
    """A peer that answers a notary's questions and does nothing else."""

    transport: Transport
    directory: Directory
    presence: Presence
    stage: int
    chain: Chain = field(init=False)
    vouched: list[Checkpoint] = field(default_factory=list)
    directed: list[Directive] = field(default_factory=list)
    answers: bool = True
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.chain = Chain(genesis_of(MANIFEST, self.stage))
        self.transport.set_message_handler(self._receive)

    def _receive(self, sender: PeerId, raw: bytes) -> None:
        match decode_message(raw, sender):
            case GetChain(locator=locator):
                height = next((h for head in locator if (h := self.chain.height_of(head)) is not None), None)
                if height is not None and self.answers:
                    self.send(sender, tuple(self.chain.certificates[height:]))
            case Cert(certificate=certificate):
                self._take(certificate)
            case ChainPage(certificates=certificates):
                for certificate in certificates:
                    self._take(certificate)
            case Vouch(checkpoint=checkpoint):
                self.vouched.append(checkpoint)
            case Directed(directive=directive):
                self.directed.append(directive)

    def _take(self, certificate: Certificate) -> None:
        if certificate.parent == self.chain.head:
            self.chain.append(certificate)

    def send(self, to: PeerId, certificates: tuple[Certificate, ...]) -> None:
        page = ChainPage(self.stage, self.chain.head, self.chain.place.view, certificates, False)
        self.say(to, encode_message(page))

    def say(self, to: PeerId, raw: bytes) -> None:
        task = asyncio.ensure_future(self.transport.send(to, raw, 30))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


@dataclass
class Bootstrap:
    """What a bootstrap has, and its notaries when they run."""

    transport: Transport
    directory: Directory
    folder: Path
    events: list[Event] = field(default_factory=list)
    running: "asyncio.Task[None] | None" = None
    registrar: Registrar | None = None

    def start(self, records: OwnerRecords | None = None) -> None:
        self.registrar = Registrar(
            MANIFEST, OWNER, transport=self.transport, directory=self.directory, folder=self.folder,
            listener=self.events.append, records=records,
        )  # fmt: skip
        self.running = asyncio.create_task(self.registrar.run())

    async def stop(self) -> None:
        if self.running is not None:
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)

    def told(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


@dataclass
class Scene:
    bootstrap: Bootstrap
    join: Callable[[str, int], Awaitable[Player]]


@pytest.fixture
async def scene(make_transport: MakeTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(registrar_module, "LOOK_FIRST_S", 0.1)
    monkeypatch.setattr(registrar_module, "LOOK_S", 0.3)
    monkeypatch.setattr(registrar_module, "RESTART_S", 0.1)
    monkeypatch.setattr(registrar_module, "PUBLISH_S", 1.0)
    async with AsyncExitStack() as stack:
        transport, identity = await make_transport("boot", namespace=MANIFEST.run_id)
        directory = await Directory.create(transport, MANIFEST.run_id, identity.key)
        stack.push_async_callback(directory.close)
        await directory.publish_manifest(MANIFEST)
        bootstrap = Bootstrap(transport, directory, tmp_path / "owner")
        stack.push_async_callback(bootstrap.stop)

        async def join(name: str, stage: int) -> Player:
            own, me = await make_transport(name, namespace=MANIFEST.run_id, initial_peers=transport.addresses)
            found = await Directory.create(own, MANIFEST.run_id, me.key)
            stack.push_async_callback(found.close)
            await found.fetch_manifest()
            presence = Presence(me.peer_id, 1, own, DialbackVerdict(outgoing_only=False))
            player = Player(own, found, presence, stage)
            await found.announce(presence.lease(stage))
            return player

        yield Scene(bootstrap, join)


async def test_each_stage_gets_its_first_roster_from_whoever_is_there(scene: Scene) -> None:
    players = [await scene.join(name, stage) for name, stage in (("a", FIRST), ("b", FIRST), ("c", LAST))]
    scene.bootstrap.start()  # else a roster is signed as soon as the first has been here for a moment
    await until(lambda: all(player.chain.height == 1 for player in players))
    signed = {event.stage: event.roster for event in scene.bootstrap.told(FirstRosterSigned)}  # type: ignore[attr-defined]
    assert {stage: set(roster) for stage, roster in signed.items()} == {
        FIRST: {players[0].presence.me, players[1].presence.me},
        LAST: {players[2].presence.me},
    }
    await scene.bootstrap.stop()
    scene.bootstrap.events.clear()
    scene.bootstrap.start()
    newcomer = await scene.join("d", FIRST)
    await until(lambda: newcomer.chain.head == players[0].chain.head)
    assert scene.bootstrap.told(FirstRosterSigned) == [], "it has a log"


async def test_a_disk_that_takes_nothing_is_named_once_and_signed_on_when_there_is_room(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, tries = Journal.write, list[object]()

    def refuse(journal: Journal, durable: Durable) -> Sequence[Block]:
        tries.append(journal)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Journal, "write", refuse)
    scene.bootstrap.start()
    player = await scene.join("a", FIRST)
    await until(lambda: len(tries) > 2)
    assert [event.line() for event in scene.bootstrap.told(Failed)] == [
        "notary of stage 0: it signs nothing until its log can be written: No space left on device; free some space"
    ]
    monkeypatch.setattr(Journal, "write", written)
    await until(lambda: player.chain.height == 1)
    assert "its log can be written again" in [event.line() for event in scene.bootstrap.told(Remark)][-1]


async def test_what_it_vouches_for_is_in_the_directory_and_outlives_it(scene: Scene) -> None:
    certified = CertifiedStage().rounds(12)
    player = await scene.join("a", STAGE)
    for certificate in certified.certificates:
        player.chain.append(certificate)
    scene.bootstrap.start()
    await until(lambda: bool(player.vouched))
    newest = player.vouched[-1]
    assert newest.head == certified.certificates[-2].head
    assert scene.bootstrap.told(RoundVouched) != []

    found = None
    for _ in range(100):
        if (found := await player.directory.word(STAGE)) is not None:
            break
        await asyncio.sleep(0.05)
    assert found is not None
    assert found[0] == newest
    await scene.bootstrap.stop()
    await player.directory.publish_word(newest)
    reader = await scene.join("b", STAGE)
    read = await reader.directory.word(STAGE)
    assert read is not None
    assert read[0] == newest

    older = sign_checkpoint(
        Checkpoint(STAGE, MANIFEST.genesis(STAGE), 1, 0, certified.certificates[0].head, 1, False), OWNER.sign
    )
    forged = sign_checkpoint(
        Checkpoint(STAGE, MANIFEST.genesis(STAGE), 1, 0, newest.head, 10**15, True), next(iter(KEYS.values())).sign
    )
    for refused in (older, forged):
        with pytest.raises(RunUnreachable):
            await player.directory.publish_word(refused)
    again = await reader.directory.word(STAGE)
    assert again is not None
    assert again[0] == newest


async def test_one_that_fails_is_told_and_begins_anew_and_the_others_go_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, failures = Notary.handle, 0

    def fail_at_first(self: Notary, event: object, now: float) -> object:
        nonlocal failures
        if self._terms.stage == FIRST and failures < 2:
            failures += 1
            raise ZeroDivisionError("planted")
        return handle(self, event, now)  # type: ignore[arg-type]

    monkeypatch.setattr(Notary, "handle", fail_at_first)
    scene.bootstrap.start()
    players = [await scene.join("a", FIRST), await scene.join("b", LAST)]
    await until(lambda: all(player.chain.height == 1 for player in players))
    told = [event.line() for event in scene.bootstrap.told(Failed)]
    assert sum(f"notary of stage {FIRST}" in line for line in told) == 2
    assert not any(f"notary of stage {LAST}" in line for line in told)
    assert await scene.bootstrap.directory.peers(FIRST) != []


async def test_one_whose_log_another_version_wrote_says_so_once_and_leaves_it_as_it_is(scene: Scene) -> None:
    raw = bytearray(encode_record(Durable(0, (), Votes(genesis_of(MANIFEST, FIRST).head))))
    raw[9] += 1
    raw[4:8] = zlib.crc32(raw[8:]).to_bytes(4, "big")
    path = scene.bootstrap.folder / f"stage-{FIRST}.log"
    path.parent.mkdir(parents=True)
    path.write_bytes(raw)
    scene.bootstrap.start()
    player = await scene.join("a", LAST)
    await until(lambda: player.chain.height == 1)
    told = [event.line() for event in scene.bootstrap.told(Failed)]
    assert ["it signs nothing" in line and "a newer dilocox-peer" in line for line in told] == [True]
    assert path.read_bytes() == raw


async def test_one_that_began_anew_tells_newcomers_what_the_owner_wants(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, failures = Notary.handle, 0

    def fail_once_told(self: Notary, event: object, now: float) -> object:
        nonlocal failures
        if isinstance(event, OwnerSpoke) and self._terms.stage == FIRST and not failures:
            failures += 1
            raise ZeroDivisionError("planted")
        return handle(self, event, now)  # type: ignore[arg-type]

    monkeypatch.setattr(Notary, "handle", fail_once_told)
    monkeypatch.setattr(registrar_module, "RECORDS_S", 0.1)
    wanted = sign_directive(Directive(MANIFEST.digest, 1, paused=True), OWNER.sign)
    player = await scene.join("a", FIRST)
    await player.directory.publish_directive(wanted)
    scene.bootstrap.start()
    await until(lambda: failures == 1)
    newcomer = await scene.join("b", FIRST)
    await until(lambda: wanted in newcomer.directed)


async def test_records_that_cannot_be_read_do_not_keep_the_directorys_directive(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What root had written at a service's home; nor was what the owner said with --link heard then."""
    monkeypatch.setattr(registrar_module, "RECORDS_S", 0.1)
    records = OwnerRecords(tmp_path / "home", MANIFEST.run_id)
    records.folder.mkdir(parents=True)
    (records.folder / "directive").write_bytes(b"nonsense")
    wanted = sign_directive(Directive(MANIFEST.digest, 1, paused=True), OWNER.sign)
    player = await scene.join("a", FIRST)
    await player.directory.publish_directive(wanted)
    scene.bootstrap.start(records)
    await until(lambda: wanted in player.directed)
    told = [event.line() for event in scene.bootstrap.told(Failed)]
    assert len(told) == 1
    assert "is no directive" in told[0]


async def test_what_is_said_elsewhere_comes_into_the_owners_records(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next word said here follows on it: a ban said with --link from a laptop was undone by it."""
    monkeypatch.setattr(registrar_module, "RECORDS_S", 0.1)
    records = OwnerRecords(tmp_path / "home", MANIFEST.run_id)
    hello, ban = (
        sign_directive(directive, OWNER.sign)
        for directive in (
            Directive(MANIFEST.digest, 1, said="hello"),
            Directive(MANIFEST.digest, 2, said="hello", banned=ROSTER[:1]),
        )
    )
    records.write_directive(hello)
    monkeypatch.setattr(registrar_module, "PUBLISH_S", 3600.0)  # the link's peers have it before they ask for it
    scene.bootstrap.start(records)
    registrar = scene.bootstrap.registrar
    assert registrar is not None
    assert registrar.directed is registrar.newest_round is None, "the directory has not been asked yet"
    player = await scene.join("a", FIRST)
    await until(lambda: hello in player.directed and registrar.directed == 1)
    await player.directory.publish_directive(ban)
    # A thread writes the record; what follows from it comes after.
    await until(lambda: scene.bootstrap.told(Remark) != [])
    assert records.directive(run=MANIFEST.digest, owner=OWNER.peer_id) == ban
    assert registrar.directed == 2
    assert scene.bootstrap.told(Failed) == []
    [told] = [event.line() for event in scene.bootstrap.told(Remark)]
    assert "directive 2 is in" in told
    assert "1 banned; before, directive 1: as the run's settings say" in told


async def test_a_directive_that_a_chain_alone_has_comes_into_records_that_were_lost(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrar_module, "RECORDS_S", 0.1)
    records = OwnerRecords(tmp_path / "home", MANIFEST.run_id)
    ban = sign_directive(Directive(MANIFEST.digest, 5, banned=("12D3KooWsomebody",)), OWNER.sign)  # type: ignore[arg-type]
    certified = CertifiedStage().round().round(directive=ban).rounds(3)
    player = await scene.join("a", STAGE)
    for certificate in certified.certificates:
        player.chain.append(certificate)
    scene.bootstrap.start(records)
    await until(lambda: records.folder.exists() and records.directive(run=MANIFEST.digest, owner=OWNER.peer_id) == ban)


async def test_two_words_with_one_number_are_settled_by_the_next_and_the_lost_one_is_told(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrar_module, "RECORDS_S", 0.1)
    records = OwnerRecords(tmp_path / "home", MANIFEST.run_id)
    hello = sign_directive(Directive(MANIFEST.digest, 1, said="hello"), OWNER.sign)
    ban = sign_directive(Directive(MANIFEST.digest, 1, banned=ROSTER[:1]), OWNER.sign)
    settled = sign_directive(Directive(MANIFEST.digest, 2, banned=ROSTER[:1]), OWNER.sign)
    records.write_directive(hello)
    player = await scene.join("a", FIRST)
    await player.directory.publish_directive(ban)
    scene.bootstrap.start(records)
    await until(lambda: settled in player.directed)
    await until(lambda: records.directive(run=MANIFEST.digest, owner=OWNER.peer_id) == settled)
    await until(lambda: scene.bootstrap.told(Failed) != [])
    found = await player.directory.directive()
    assert found is not None
    assert found[0] == settled
    [told] = [event.line() for event in scene.bootstrap.told(Failed)]
    assert told.startswith(
        "the owner's directives: said in two places with number 1: directive 2 says the one again (1 banned)"
    )
    assert '"hello"' in told


async def test_nonsense_is_refused_and_told_and_the_rest_is_heard(scene: Scene) -> None:
    scene.bootstrap.start()
    player = await scene.join("a", FIRST)
    to = scene.bootstrap.transport.peer_id
    for raw in (b"", b"\xc1" * 100, bytes(70_000), encode_message(GetChain(200, player.chain.head, 0, ()))):
        player.say(to, raw)
    await until(lambda: player.chain.height == 1)
    assert 1 <= len(scene.bootstrap.told(MessageRefused)) <= 3, "and not once for each"
