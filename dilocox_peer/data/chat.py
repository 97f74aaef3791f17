"""Conversations as documents: written out by the chat template of a published tokenizer, with the stretches that are answers.

A template is a program in Jinja that came with a model: it runs in Jinja's sandbox, and sees the messages and nothing else. What
an assistant says, up to the token that ends its turn, is what is trained on; the rest is read and counts for nothing. Special
tokens are the template's to set: a message that spells one is refused, as it would end a turn.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from dilocox_peer.errors import ConfigError
from dilocox_peer.extras import pip_install

ASSISTANT = "assistant"
MAX_TEMPLATE_BYTES = 1 << 20
MAX_MESSAGES = 1000
MAX_TEXT = 1 << 20  # characters of a conversation
TODAY = datetime(2024, 7, 26)  # as templates have it that are not told: what is written depends on no day

Spans = tuple[tuple[int, int], ...]
"""Stretches of a text, in characters, that count."""


class NoConversation(ValueError):
    """What is no conversation that this template can write, with the reason."""


@dataclass(frozen=True, slots=True)
class TemplateFiles:
    """What lies beside a tokenizer.json. tokens: the special ones that a template may name, as bos_token and the like."""

    source: str
    tokens: Mapping[str, str]


def read_template(folder: Path) -> TemplateFiles:
    """The chat template in a published tokenizer's folder: chat_template.jinja, else as tokenizer_config.json has it. Raises ConfigError."""
    config = _json(folder / "tokenizer_config.json")
    tokens = {name: _text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    try:
        with (folder / "chat_template.jinja").open(encoding="utf-8", errors="replace") as file:
            source: Any = file.read(MAX_TEMPLATE_BYTES + 1)
    except OSError:
        source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {str(each.get("name")): each.get("template") for each in source if isinstance(each, Mapping)}
        source = named.get("default")
    if not isinstance(source, str) or not source:
        raise ConfigError(
            f"{folder} has no chat template: name the folder of an instruct model, with its chat_template.jinja or tokenizer_config.json"
        )
    if len(source) > MAX_TEMPLATE_BYTES:
        raise ConfigError(f"the chat template in {folder} is larger than {MAX_TEMPLATE_BYTES >> 20} MB")
    return TemplateFiles(source, tokens)


class Writer(Protocol):
    """What writes conversations."""

    def written(self, record: object) -> tuple[str, Spans]:
        """(the text of a conversation, the stretches of it that answers are). record: a list of messages, each with `role` and
        `content`. Raises NoConversation."""
        ...


class ChatTemplate:
    """A Writer. One thread. Its memory and its time are bounded in chat_process.py alone."""

    def __init__(self, files: TemplateFiles, special: Collection[str]) -> None:
        """special: tokens that no message may spell. Raises ConfigError."""
        try:
            from jinja2 import TemplateError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise ConfigError(f"`{pip_install('data', 'jinja2')}` brings what reads chat templates") from None

        def refuse(reason: str) -> None:
            raise TemplateError(reason)

        # As transformers sets it up: templates are written for that.
        class Environment(ImmutableSandboxedEnvironment):
            intercepted_binops = frozenset(("*", "**", "%"))

            def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
                takes_text = operator == "*"  # a line of dashes
                if operator == "**" or not (_is_small(left, takes_text) and _is_small(right, takes_text)):
                    raise TemplateError(f"it computes {operator} of what is no small number")
                return super().call_binop(context, operator, left, right)

        environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = TODAY.strftime
        try:
            self._template = environment.from_string(files.source)
        except (TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise ConfigError(f"the chat template is none: {_one_line(error)}") from None
        self._tokens = files.tokens
        self._special = tuple(each for each in special if each)

    def written(self, record: object) -> tuple[str, Spans]:
        messages = checked_messages(record, self._special)
        whole = self._render(messages, len(messages))
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._render(messages, index, asks=True)
            after = whole if index == len(messages) - 1 else self._render(messages, index + 1)
            if not (whole.startswith(after) and after.startswith(before)):
                raise NoConversation("the template writes earlier turns otherwise than the last: train on single turns")
            # What follows the end of the turn, a line break, belongs to no answer.
            spans.append((len(before), len(before) + len(after[len(before) :].rstrip())))
        spans = [span for span in spans if span[1] > span[0]]
        if not spans:
            raise NoConversation("no answer in it")
        return whole, tuple(spans)

    def _render(self, messages: Sequence[Mapping[str, str]], count: int, *, asks: bool = False) -> str:
        """The first messages; asks: with what begins an answer."""
        if not count and not asks:
            return ""
        from jinja2 import TemplateError

        try:
            text = self._template.render(messages=list(messages[:count]), add_generation_prompt=asks, **self._tokens)
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RuntimeError,
            MemoryError,
        ) as error:
            raise NoConversation(f"the template refuses it: {_one_line(error)}") from None
        if len(text) > 4 * MAX_TEXT:
            raise NoConversation(f"more than {4 * MAX_TEXT} characters as the template writes it")
        return text


def checked_messages(record: object, special: Collection[str]) -> list[dict[str, str]]:
    """The messages of a conversation, role and content. special: tokens that none may spell. Raises NoConversation."""
    if not isinstance(record, Sequence) or isinstance(record, str | bytes) or not 0 < len(record) <= MAX_MESSAGES:
        raise NoConversation("no list of messages")
    messages = []
    for each in record:
        role, content = (each.get("role"), each.get("content")) if isinstance(each, Mapping) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str) or len(role) > 64:
            raise NoConversation('a message without "role" and "content", both strings')
        if found := next((token for token in special if token in content or token in role), None):
            raise NoConversation(f"a message spells the special token {found}")
        messages.append({"role": role, "content": content})
    if sum(len(each["content"]) for each in messages) > MAX_TEXT:
        raise NoConversation(f"more than {MAX_TEXT} characters")
    return messages


def _is_small(value: object, takes_text: bool) -> bool:
    if isinstance(value, str):
        return takes_text and len(value) <= MAX_MESSAGES
    return isinstance(value, int | float) and abs(value) <= MAX_MESSAGES


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(MAX_TEMPLATE_BYTES + 1))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _text(token: object) -> str:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""
