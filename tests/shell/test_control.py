"""The control socket: its owner's alone, bounded, and honest about what it did."""

import asyncio
import json
import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from dilocox_peer.cli.flags import PeerFlags
from dilocox_peer.cli.operate import send
from dilocox_peer.errors import ConfigError, DilocoxError
from dilocox_peer.events import Remark, RunJoined
from dilocox_peer.events_of_data import Evaluated
from dilocox_peer.peer import control
from dilocox_peer.peer.control import (
    KEPT,
    MAX_CONNECTIONS,
    MAX_REQUEST_BYTES,
    ControlRefused,
    Controls,
    ControlServer,
    Memory,
    NotRunning,
    ask,
    command_of,
    follow,
    socket_path,
)
from tests.unit.dashboard_data import events, joined


def controls(said: list[str]) -> Controls:
    def do(what: str):
        def act(*seconds: int | None) -> str:
            if what == "leave" and "paused" in said:
                raise DilocoxError("not now")
            said.append(what if seconds in ((), (None,)) else f"{what} for {seconds[0]} s")
            return f"{what} done"

        return act

    return Controls(
        status=lambda: {"phase": "training"},
        pause=do("paused"),
        resume=do("resumed"),
        leave=do("leave"),
        finish=do("finish"),
    )


def server(path: Path, said: list[str] | None = None) -> ControlServer:
    return ControlServer(path, controls([] if said is None else said), clock=time.time)


async def test_commands_are_carried_out_and_answered(tmp_path):
    said: list[str] = []
    async with server(tmp_path / "s", said):
        assert (await ask(tmp_path / "s", "status"))["status"] == {"phase": "training"}
        assert (await ask(tmp_path / "s", "pause"))["said"] == "paused done"
        with pytest.raises(ControlRefused, match="not now"):
            await ask(tmp_path / "s", "leave")
        assert (await ask(tmp_path / "s", "finish"))["said"] == "finish done"
        with pytest.raises(ControlRefused, match="unknown command"):
            await ask(tmp_path / "s", "explode")
    assert said == ["paused", "finish"]
    assert not (tmp_path / "s").exists()


async def test_nobody_but_its_owner_may_open_it(tmp_path):
    async with server(tmp_path / "s"):
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600


async def test_a_dead_peers_socket_is_replaced_a_living_ones_is_not(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(NotRunning):
        await ask(path, "status")
    async with server(path):
        with pytest.raises(ConfigError, match="already"):
            async with server(path):
                pass
        assert await ask(path, "status")
    with pytest.raises(NotRunning, match="no peer is running"):
        await ask(path, "status")


async def test_stand_ins_of_killed_peers_are_swept_and_those_in_use_kept(
    tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "STAND_INS", short_path)
    names = ("alive", "dead", "empty", "new", "full")
    stand_in = {name: socket_path(tmp_path / (name * 40)).parent for name in names}
    assert all(folder.parent == short_path for folder in stand_in.values())
    async with server(socket_path(tmp_path / ("alive" * 40))):
        for name in names[1:]:
            stand_in[name].mkdir(mode=0o700)
            if name != "empty":
                with socket.socket(socket.AF_UNIX) as killed:
                    killed.bind(str(stand_in[name] / "control.sock"))
        (stand_in["full"] / "note").touch()
        (short_path / f"dilocox-{os.getuid()}-of-another").mkdir()
        for name in set(os.listdir(short_path)) - {stand_in["new"].name}:
            os.utime(short_path / name, (1.0, 1.0))
        async with server(socket_path(tmp_path / ("mine" * 40))):
            left = set(os.listdir(short_path))
            gone = {name for name in names if stand_in[name].name not in left}
            assert gone == {"dead", "empty"}
            assert f"dilocox-{os.getuid()}-of-another" in left
            assert os.listdir(stand_in["full"]) == ["note"]
            assert os.listdir(stand_in["alive"]) == ["control.sock"]


@pytest.mark.parametrize("raw", [b"", b"\n", b"{}\n", b"[]\n", b"null\n", b"\xff\n", b'{"command": 1}\n', b'{"command": "leave", "x": 1}\n', b"[" * 4000 + b"\n", b"x" * (2 * MAX_REQUEST_BYTES)])  # fmt: skip
async def test_what_is_no_request_changes_nothing(tmp_path, raw):
    said: list[str] = []
    async with server(tmp_path / "s", said):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        writer.write(raw)
        writer.write_eof()
        answer = json.loads(await reader.readline())
        assert answer["ok"] is False
        writer.close()
        assert await ask(tmp_path / "s", "status")
    assert said == []


async def test_a_subscriber_is_told_the_past_and_the_present_in_order(tmp_path):
    told: list[dict[str, Any]] = []
    heard = {"TrainingProgress": asyncio.Event(), "Remark": asyncio.Event()}

    def take(record: dict[str, Any]) -> None:
        told.append(record)
        if record["event"] in heard:
            heard[record["event"]].set()

    async with server(tmp_path / "s") as running:
        for _at_s, event in events():
            running.tell(event)
        await asyncio.sleep(0)
        following = asyncio.create_task(follow(tmp_path / "s", take))
        await heard["TrainingProgress"].wait()
        running.tell(Remark("news"))
        await heard["Remark"].wait()
    await following
    assert told[0]["event"] == "RunJoined"
    assert [each["round"] for each in told if each["event"] == "RoundCertified"] == list(range(3, 32))


async def test_a_loss_that_diverged_is_null_to_a_subscriber(tmp_path):
    async with server(tmp_path / "s") as running:
        running.tell(Evaluated(3, float("nan"), 100))
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        writer.write(b'{"command": "subscribe"}\n')
        assert b"ok" in await reader.readline()
        assert b'"val_loss": null' in await reader.readline()
        writer.close()


async def test_a_subscriber_that_does_not_read_is_hung_up_on_and_holds_up_nobody(tmp_path):
    async with server(tmp_path / "s") as running:
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s", limit=1024)
        writer.write(b'{"command": "subscribe"}\n')
        assert b"ok" in await reader.readline()
        for _ in range(40):
            for _ in range(200):
                running.tell(Remark("x" * 300))
            await asyncio.sleep(0)
        assert await ask(tmp_path / "s", "status")
        assert not running.subscribers or all(queue.qsize() <= queue.maxsize for queue in running.subscribers)
        writer.close()
        del reader


async def test_connections_are_bounded(tmp_path):
    async with server(tmp_path / "s"):
        # Accepted in this order, and what asks for more comes after them.
        held = [await asyncio.open_unix_connection(tmp_path / "s") for _ in range(MAX_CONNECTIONS)]
        with pytest.raises(NotRunning, match="does not answer"):
            await ask(tmp_path / "s", "status")
        for _reader, writer in held:
            writer.write_eof()
        for reader, writer in held:
            assert b"a request is one line" in await reader.read()  # to its end: its place is free
            writer.close()
        assert await ask(tmp_path / "s", "status")


async def test_who_asks_for_a_peer_that_does_not_run_is_told_the_names_that_do(tmp_path):
    homes = {name: PeerFlags(home=tmp_path, name=name) for name in ("a", "b", "default")}
    homes["b"].peer_home.make()  # was here once
    with pytest.raises(NotRunning, match="no peer is running here"):
        await asyncio.to_thread(send, "pause", homes["default"])
    async with server(socket_path(homes["a"].peer_home.folder)):
        with pytest.raises(NotRunning, match="no peer is running here as 'default': pass --name a, which does"):
            await asyncio.to_thread(send, "pause", homes["default"])
        await asyncio.to_thread(send, "pause", homes["a"])


@pytest.mark.parametrize("command", ["pause", "leave"])
async def test_a_bootstrap_is_not_named_to_whoever_pauses_or_leaves(tmp_path, command):
    homes = {name: PeerFlags(home=tmp_path, name=name) for name in ("a", "bootstrap", "default")}
    async with server(socket_path(homes["bootstrap"].peer_home.folder)):
        with pytest.raises(NotRunning) as raised:
            await asyncio.to_thread(send, command, homes["default"])
        assert "--name bootstrap" not in str(raised.value)
        async with server(socket_path(homes["a"].peer_home.folder)):
            with pytest.raises(NotRunning, match="as 'default': pass --name a, which does"):
                await asyncio.to_thread(send, command, homes["default"])
            await asyncio.to_thread(send, command, homes["a"])
        await asyncio.to_thread(send, command, homes["bootstrap"])  # whoever names it means it


def test_a_long_home_has_a_short_socket_of_its_own():
    long = Path("/home") / ("x" * 120)
    assert len(os.fsencode(socket_path(long))) <= 100
    assert socket_path(long) == socket_path(long)
    assert socket_path(long) != socket_path(long / "y")
    assert socket_path(Path("/home/x")) == Path("/home/x/control.sock")


def test_memory_keeps_who_we_are_and_forgets_old_talk():
    memory = Memory()
    memory.keep(joined(), joined().record(0.0))
    for index in range(3 * KEPT):
        memory.keep(Remark(str(index)), Remark(str(index)).record(float(index)))
    records = memory.records()
    assert records[0]["event"] == RunJoined.__name__
    assert len(records) == KEPT + 1
    assert records[-1]["text"] == str(3 * KEPT - 1)


@pytest.mark.parametrize(("raw", "command"), [(b'{"command":"pause"}', "pause"), (b'"pause"', None), (b'{"command":"a","b":2}', None)])  # fmt: skip
def test_a_request_is_exactly_one_command(raw, command):
    assert command_of(raw) == command


async def test_a_pause_may_say_for_how_long(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "control.sock"
    async with server(path, said):
        assert (await ask(path, "pause 7200"))["said"] == "paused done"
        for wrong in ("pause 0", "pause -1", "pause 1e3", "pause 99999999999", "pause ", "resume 5"):
            with pytest.raises(ControlRefused, match="unknown command"):
                await ask(path, wrong)
    assert said == ["paused for 7200 s"]
