"""A chat template in a process of its own, with a bound on its memory and a deadline for each conversation.

A template is a stranger's program. The sandbox (chat.py) keeps it from everything but writing text; it does not keep it from writing
for ever, nor from doubling a string forty times. What it does, compiling included, it does here, and is ended when it is late.
"""

import json
import multiprocessing
from collections.abc import Collection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from dilocox_peer.data.chat import ChatTemplate, NoConversation, Spans, TemplateFiles, checked_messages
from dilocox_peer.errors import ConfigError

DEADLINE_S = 30.0
START_S = 60.0  # on a machine with much else to do
MAX_BYTES = 1 << 29  # of memory that the process makes
MAX_LATE = 3
"""Conversations that a template may be late with; then it is no template that ends."""


class ChatProcess:
    """What ChatTemplate does, one conversation at a time. One thread. `with` ends the process."""

    def __init__(self, files: TemplateFiles, special: Collection[str], *, deadline_s: float = DEADLINE_S) -> None:
        """special: tokens that no message may spell. Raises ConfigError for what is no template."""
        self._files = files
        self._special = tuple(each for each in special if each)
        self._deadline_s = deadline_s
        self._late = 0
        self._child: BaseProcess | None = None
        self._start()

    def __enter__(self) -> "ChatProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def written(self, record: object) -> tuple[str, Spans]:
        """As ChatTemplate's. Raises NoConversation, and ConfigError for a template that is late again and again."""
        messages = checked_messages(record, self._special)
        if self._child is None:
            self._start()
        answer = self._asked([[each["role"], each["content"]] for each in messages], self._deadline_s)
        if answer is None:
            self._late += 1
            if self._late >= MAX_LATE:
                raise ConfigError(
                    f"the chat template did not end within {self._deadline_s:.0f} s, {self._late} times: name the folder of another model"
                )
            raise NoConversation(f"the template was not done with it within {self._deadline_s:.0f} s")
        if isinstance(answer, str):
            raise NoConversation(answer)
        text, spans = answer
        return str(text), tuple((int(first), int(end)) for first, end in spans)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._child = context.Process(target=_write_for, args=(theirs,), daemon=True)
        self._child.start()
        theirs.close()
        refused = self._asked([self._files.source, dict(self._files.tokens), list(self._special)], START_S)
        if refused != "":
            self._end()
            raise ConfigError(str(refused or f"the chat template is none: it could not be read within {START_S:.0f} s"))

    def _asked(self, what: object, seconds: float) -> Any:
        """None: no answer came in time, and the process is gone."""
        try:
            self._ours.send_bytes(json.dumps(what).encode())
            if self._ours.poll(seconds):
                return json.loads(self._ours.recv_bytes())
        except (EOFError, OSError):  # it has died: out of memory
            pass
        self._end()
        return None

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            self._ours.close()
            child.kill()
            child.join()


def _write_for(connection: Connection) -> None:
    """In the process, until the other end is closed or dies."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who asks
    _bound_memory()
    try:
        source, tokens, special = json.loads(connection.recv_bytes())
        try:
            template = ChatTemplate(TemplateFiles(source, tokens), special)
        except ConfigError as error:
            connection.send_bytes(json.dumps(str(error)).encode())
            return
        connection.send_bytes(b'""')
        while True:
            record = [{"role": role, "content": content} for role, content in json.loads(connection.recv_bytes())]
            try:
                answer: object = template.written(record)
            except NoConversation as error:
                answer = str(error)
            connection.send_bytes(json.dumps(answer).encode())
    except (EOFError, OSError):
        return


def _bound_memory() -> None:
    """Where the system can: what a template makes beyond that is a MemoryError, or the end of the process."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    except (ImportError, AttributeError, ValueError, OSError):
        return
