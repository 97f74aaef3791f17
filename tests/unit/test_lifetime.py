"""Ctrl-C before the event loop is there to hear it."""

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest

from dilocox_peer.cli.lifetime import Stop, interruptible, run_until_stopped


def load(made_of_an_interrupt: Exception | None) -> None:
    """An import in which Ctrl-C is pressed, and which does something else about it."""
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        if made_of_an_interrupt is not None:
            raise made_of_an_interrupt from None


@pytest.fixture(autouse=True)
def heeds_ctrl_c():
    """A background job of a shell begins without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("made_of_it", [RecursionError(), None], ids=["another error", "nothing"])
def test_an_interrupt_that_an_import_garbles_is_an_interrupt(made_of_it):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible():
        load(made_of_it)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_import_that_fails_by_itself_is_told_as_it_is():
    with pytest.raises(ImportError, match="torch"), interruptible():
        raise ImportError("torch")


@pytest.mark.parametrize("is_at_work", [False, True])
def test_a_process_ends_whatever_its_threads_are_at(is_at_work):
    program = (
        "import threading, time, typer\n"
        "from dilocox_peer.cli.lifetime import end\n"
        f"threading.Thread(target=time.sleep, args=({600 if is_at_work else 0},)).start()\n"
        "print('said')\n"
        "try:\n"
        "    end(7)\n"
        "except typer.Exit as left:\n"
        "    raise SystemExit(left.exit_code)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "said\n", "")


def test_the_end_does_not_wait_for_the_interpreter_to_take_everything_apart():
    program = (
        "import atexit\n"
        "from dilocox_peer.cli.lifetime import end\n"
        "class Left:\n"
        "    def __del__(self):\n"
        "        print('taken apart', flush=True)\n"
        "left = Left()\n"
        "atexit.register(print, 'registered', flush=True)\n"
        "print('closed')\n"
        "try:\n"
        "    end(130)\n"
        "except BaseException:\n"
        "    raise SystemExit(130)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (130, "closed\n")


def test_an_interrupt_within_exec_ends_with_130_too_and_all_is_cleaned_up(tmp_path):
    """So much is in an exec() while torch loads; Python itself would end by SIGINT."""
    (tmp_path / "interrupted.py").write_text(
        "import atexit\n"
        "from dilocox_peer.__main__ import main\n"
        "from dilocox_peer.cli import main as commands\n"
        "def run():\n"
        "    atexit.register(print, 'cleaned up')\n"
        "    exec('raise KeyboardInterrupt')\n"
        "commands.main = run\n"
        "main()\n"
    )
    program = [sys.executable, "-m", "interrupted"]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(program, env=found, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "cleaned up\n", "")


def test_an_end_does_not_wait_for_what_a_thread_reads() -> None:
    is_over, is_read = threading.Event(), threading.Event()

    def read() -> None:
        is_over.wait(60.0)
        is_read.set()

    async def work(_stop: Stop) -> None:
        asyncio.get_running_loop().run_in_executor(None, read)
        await asyncio.sleep(0)

    try:
        assert run_until_stopped(work, until_stdin_closes=False) == 0
        assert not is_read.is_set()
    finally:
        is_over.set()
