"""hivemind's go-libp2p daemon: started, mended where hivemind's bindings hang or leak, asked where it is, and stopped.

With transport.py the only place beside the directory that imports hivemind, and only inside functions: that pulls in torch.
What surrounds the process without hivemind is p2pd.py.
"""

import asyncio
import logging
import os
import signal
import warnings
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilocox_peer.errors import ConfigError, RunUnreachable
from dilocox_peer.invitation import Address, parse_multiaddr
from dilocox_peer.network.bulk import PeerGone
from dilocox_peer.network.p2pd import FairReader, HandlerTasks, PendingCalls, diagnose, launch_command
from dilocox_peer.types import PeerId

if TYPE_CHECKING:
    from hivemind.p2p import P2P


async def mend_bindings(p2p: "P2P") -> None:
    """To be called before there is a handler or a call: it moves them to another connection with p2pd."""
    control = p2p._client.control
    control._pending_calls = PendingCalls(control._pending_calls)
    control._handler_tasks = HandlerTasks()
    reader, writer = await control.daemon_connector.open_persistent_connection()
    before = {control._read_task, control._write_task}
    control._read_task = asyncio.create_task(control._read_from_persistent_conn(FairReader(reader)))
    control._write_task = asyncio.create_task(control._write_to_persistent_conn(writer))
    for task in before:
        task.cancel()
    await asyncio.wait(before)


def quiet_hivemind() -> None:
    """Imports hivemind, which takes seconds, without its prints, log handler and warnings. Every use of it begins here."""
    warnings.filterwarnings("ignore", module=r"hivemind(\.|$)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from hivemind.utils.logging import use_hivemind_log_handler
    use_hivemind_log_handler("nowhere")
    logging.getLogger("hivemind").setLevel(logging.CRITICAL)


def daemon_class(socket_dir: Path, output: deque[str], started: list["P2P"]) -> type["P2P"]:
    """hivemind's P2P with sockets in socket_dir, p2pd started by launch_command, its lines kept in output, and every
    instance put into `started` at once: create() does not stop its p2pd when it fails or is cancelled."""
    quiet_hivemind()
    from hivemind.p2p import P2P

    class Daemon(P2P):  # type: ignore[misc, unused-ignore]
        _UNIX_SOCKET_PREFIX = f"/unix{socket_dir}/"
        _child: Any

        def __init__(self) -> None:
            super().__init__()
            started.append(self)

        @staticmethod
        def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
            command: list[str] = P2P._make_process_args(*args, **kwargs)
            return launch_command(command)

        def _terminate(self) -> None:
            """As hivemind's, but Popen.terminate polls before it signals: a p2pd that has just ended is reaped there, and
            asyncio's own watcher then says "Unknown child process" on the terminal."""
            child, self._child = self._child, None
            try:
                super()._terminate()
            finally:
                self._child = child
            if child is not None and child.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGTERM)
                with suppress(FileNotFoundError, TypeError):
                    os.remove(self._daemon_listen_maddr["unix"])

        @staticmethod
        def _log_p2pd_message(line: str) -> None:
            output.append(line)

    return Daemon


async def start_daemon(daemon: type["P2P"], *, output: deque[str], initial: list[Address], **arguments: Any) -> "P2P":
    """P2P.create with our errors: the stage that failed, what it was about, and the remedy."""
    from hivemind.p2p import P2PDaemonError

    try:
        return await daemon.create(**arguments)
    except P2PDaemonError as error:
        message = one_line(str(error).removeprefix("Daemon failed to start:"))
        if "failed to connect to bootstrap peers" in message:
            raise RunUnreachable(await diagnose(initial)) from None
        if "failed to listen" in message:
            hosts = ", ".join(arguments["host_maddrs"])
            raise ConfigError(f"cannot listen on {hosts} ({message}): pass another --host-maddrs") from None
        if "failed to start in" in message and initial:  # without anybody to dial it takes 0.1 s
            raise RunUnreachable(await diagnose(initial)) from None
        if "failed to start in" in message:
            limit = f"{arguments['startup_timeout']:g} s"
            raise ConfigError(
                f"p2pd was not ready within {limit}: the machine is overloaded; try again when it has less to do"
            ) from None
        last = one_line(output[-1]) if output else message
        raise ConfigError(f"p2pd did not start: {last or 'it ended without a word'}") from None
    except OSError as error:
        raise ConfigError(f"p2pd did not start: {error}; hivemind has to be installed with its binary") from None


async def visible_addresses(p2p: "P2P", *, latest: bool) -> tuple[str, ...]:
    try:
        found = [str(address) for address in await p2p.get_visible_maddrs(latest=latest)]
    except ValueError:  # none yet: behind a NAT, and no relay found so far
        return ()
    usable = []
    for text in found:
        with suppress(ConfigError):  # QUIC addresses of a relay, say
            usable.append(parse_multiaddr(text, "lease").text)
    return tuple(usable)


async def stop_daemon(p2p: "P2P", timeout_s: float) -> None:
    """Ends p2pd and what hivemind left running for it. When cancelled, p2pd is killed at once."""
    child = p2p._child
    tasks = {task for task in (p2p._reader_task, p2p._listen_task) if task is not None}
    if p2p._client is not None:
        tasks |= {
            task for task in (p2p._client.control._read_task, p2p._client.control._write_task) if task is not None
        }
    p2p._terminate()
    for task in tasks:
        task.cancel()  # hivemind's own cancelling does nothing when its loop is not the current one
    try:
        if child is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), timeout_s)
            if child.returncode is None:  # frozen, say
                child.kill()
                await child.wait()
    except BaseException:
        with suppress(ProcessLookupError):
            child.kill()
        raise
    finally:
        if child is not None:
            child._transport.close()  # its pipe; else "Event loop is closed" at exit
    if tasks:
        done, _ = await asyncio.wait(tasks, timeout=timeout_s)
        for task in done:
            if not task.cancelled():
                task.exception()  # retrieved; the daemon is gone, so it failed


def raw_peer(peer: PeerId) -> bytes:
    """Raises PeerGone for a name that is no PeerID: the next roster is what a leader wrote, and we greet all of it."""
    from hivemind.p2p import PeerID

    try:
        raw: bytes = PeerID.from_base58(peer).to_bytes()
    except ValueError:
        raise PeerGone(peer, "that is not the name of a peer") from None
    return raw


def one_line(text: str) -> str:
    return " ".join(text.split())[:300]
