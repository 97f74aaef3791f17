"""The house rules, as ratchets: each rule holds for the whole tree but for the exceptions listed here, and the lists only shrink.

A new offender fails its test, and so does a listed one that offends no longer. The lists are today's debt, not a licence:
what stands there when a room is cleaned is taken off with it. test_floors.py has the rules that have no exceptions.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "dilocox_peer"
TESTS = REPOSITORY / "tests"

MAX_LINES = 500

DEFINED_TWICE: dict[str, int] = {}
"""Name -> how many classes and type aliases have it."""

PACKS_BY_HAND = {
    "dht/entry.py",
    "dht/validators.py",
    "network/frames.py",
    "types.py",
}  # the first two take apart hivemind's
"""Modules outside wire/ that import msgpack or msgspec; why: docs/decisions/0026."""

NEVER_HAPPENS: set[str] = set()
"""Event classes that nothing constructs."""

TWO_ROWS: dict[str, int] = {}
"""Word of the glossary -> its rows."""

READS_A_CLOCK = {"cli/hours.py", "cli/idle.py"}
"""Modules that are called pure and read a clock; why: docs/decisions/0026."""

PRIVATE: dict[str, int] = {}
"""Test file -> how often it reaches into what is private to another object."""


# -- what is read of the tree, each file once --------------------------------------------------------------------------


@dataclass(slots=True)
class Source:
    """What the rules ask of one file."""

    docstring: str
    num_lines: int
    names: list[str] = field(default_factory=list)  # of classes and type aliases
    events: list[str] = field(default_factory=list)
    libraries: set[str] = field(default_factory=set)
    called: set[str] = field(default_factory=set)
    clocks: set[str] = field(default_factory=set)
    private: list[str] = field(default_factory=list)


CLOCKS = {
    "time",
    "time_ns",
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "perf_counter_ns",
    "process_time",
    "thread_time",
}
OF_A_MOMENT = {"localtime": 1, "gmtime": 1, "ctime": 1, "strftime": 2}  # of now, with fewer arguments than that
PUBLIC_ALL_THE_SAME = {"_fields", "_replace", "_asdict", "_exit"}  # documented: ast and namedtuple's, os._exit
BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "object"}  # monkeypatch.setattr and mock.patch.object among them


@cache
def package() -> dict[str, Source]:
    """Path within the package -> what is in it."""
    return {path.relative_to(PACKAGE).as_posix(): read(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def files_of_tests() -> dict[str, Source]:
    """Path within tests -> what is in it."""
    return {path.relative_to(TESTS).as_posix(): read(path.read_text()) for path in sorted(TESTS.rglob("*.py"))}


def read(text: str) -> Source:
    tree = ast.parse(text)
    found = Source(ast.get_docstring(tree) or "", text.count("\n"))
    found.names += [name for node in tree.body if (name := _alias(node))]
    waiting: list[ast.AST] = [tree]
    while waiting:  # ast.walk takes twice the time, and three quarters of the nodes are names, constants and contexts
        node = waiting.pop()
        if (look := _LOOKS.get(type(node))) is not None:
            look(node, found)
        for name in node._fields:
            child = getattr(node, name)
            if isinstance(child, list):
                waiting += [each for each in child if isinstance(each, ast.AST)]
            elif isinstance(child, ast.AST) and not isinstance(child, ast.Name | ast.Constant | ast.expr_context):
                waiting.append(child)
    return found


def _class(node: ast.ClassDef, found: Source) -> None:
    found.names.append(node.name)
    if any(isinstance(base, ast.Name) and base.id == "Event" for base in node.bases):
        found.events.append(node.name)


def _import(node: ast.Import, found: Source) -> None:
    found.libraries |= {name.name.partition(".")[0] for name in node.names}


def _import_from(node: ast.ImportFrom, found: Source) -> None:
    found.libraries.add((node.module or "").partition(".")[0])
    found.private += [f"{node.module}.{name.name}" for name in node.names if _is_private(name.name)]
    if node.module == "time":
        found.clocks |= {f"time.{name.name}" for name in node.names if name.name in CLOCKS | set(OF_A_MOMENT)}


def _attribute(node: ast.Attribute, found: Source) -> None:
    if _is_private(node.attr) and not _is_own(node.value):
        found.private.append(ast.unparse(node))
    if node.attr in CLOCKS and isinstance(node.value, ast.Name) and node.value.id == "time":
        found.clocks.add(f"time.{node.attr}")  # called, or the default of a parameter


def _call(node: ast.Call, found: Source) -> None:
    match node.func:
        case ast.Name(name):
            pass
        case ast.Attribute(value, name):
            whose = value.id if isinstance(value, ast.Name) else ""
            if whose == "time" and len(node.args) < OF_A_MOMENT.get(name, 0):
                found.clocks.add(f"time.{name}")
            elif whose in {"datetime", "date"} and name in {"now", "utcnow", "today"}:
                found.clocks.add(f"{whose}.{name}")
            elif name == "time" and whose != "time" and not node.args:
                found.clocks.add("loop.time")
        case _:
            return
    found.called.add(name)
    if name in BY_NAME and len(node.args) > 1:
        match node.args[:2]:
            case [of, ast.Constant(str(what))] if _is_private(what) and not _is_own(of):
                found.private.append(f"{ast.unparse(of)}.{what}")


_LOOKS: dict[type[ast.AST], Callable[[Any, Source], None]] = {
    ast.ClassDef: _class,
    ast.Import: _import,
    ast.ImportFrom: _import_from,
    ast.Attribute: _attribute,
    ast.Call: _call,
}


def _alias(node: ast.stmt) -> str | None:
    """The name of a type alias or variable: a word with a capital, given a value at the top of a module."""
    match node:
        case ast.Assign([ast.Name(name)]) | ast.AnnAssign(ast.Name(name)) if re.match(r"_?[A-Z]\w*[a-z]", name):
            return name
    return None


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC_ALL_THE_SAME


def _is_own(value: ast.expr) -> bool:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super":
        return True  # of a class that it extends
    return isinstance(value, ast.Name) and value.id in {"self", "cls"}


@cache
def architecture() -> str:
    return (REPOSITORY / "ARCHITECTURE.md").read_text()


def _table(header: str) -> Iterator[list[str]]:
    """The rows of the Markdown table with this header."""
    _before, found, after = architecture().partition(header + "\n")
    assert found, f"ARCHITECTURE.md has no table {header!r} any more: tell test_house.py what it is called now"
    for line in after.splitlines()[1:]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def pure_modules() -> set[str]:
    """Those that ARCHITECTURE.md's table calls pure, and those whose own first words say it."""
    known = set(package())
    pure = {path for path in known if re.search(r"\bPure\b(?! but)", package()[path].docstring)}
    for cell, *_ in _table("| pure | its shell |"):
        folder = ""
        for name in re.findall(r"`([\w/.]+)`", cell):
            if name.endswith("/"):
                pure |= {path for path in known if path.startswith(name)}
            elif name.endswith(".py"):
                # "`pipeline/scheduler.py` and its parts `upstream.py`": beside the one named before.
                path = name if name in known else f"{folder}/{name}"
                assert path in known, f"ARCHITECTURE.md calls {name} pure, and there is no such module"
                pure.add(path)
                folder = path.rpartition("/")[0]
    return pure


def ratchet(
    found: Mapping[str, int],
    listed: Mapping[str, int],
    *,
    remedy: str,
    where: Mapping[str, Iterable[str]] | None = None,
    least: int = 1,
) -> None:
    """Fails for what is found more often than its list says, and then for what the list says and is found no more.

    found: of each offender its measure (how often, how many lines), not under `least`. where: what a person has to open for each.
    """
    worse = [name for name, measure in found.items() if measure > listed.get(name, least - 1)]
    better = [name for name, measure in listed.items() if found.get(name, 0) < measure or name not in found]
    lines = [f"  {name}: {found[name]}, {listed.get(name, 0)} listed" for name in worse]
    if where is not None:
        lines = [f"{line}: {', '.join(sorted(set(where[name])))}" for line, name in zip(lines, worse, strict=True)]
    assert not worse, "\n".join([remedy, *lines])
    remedies = [f"write {found[name]}" if name in found else "take it off the list" for name in better]
    assert not better, "\n".join(
        ["It is better by now than its list says:", *map("  {}: {}".format, better, remedies)],
    )


# -- the rules ---------------------------------------------------------------------------------------------------------


def test_no_name_is_defined_twice():
    where: dict[str, list[str]] = defaultdict(list)
    for path, source in package().items():
        for name in source.names:
            where[name].append(path)
    twice = {name: len(paths) for name, paths in where.items() if len(paths) > 1}
    ratchet(twice, DEFINED_TWICE, where=where, least=2, remedy="One name, one thing: give one of them another name.")


def test_messages_are_packed_in_wire_alone():
    packing = {
        path: 1
        for path, source in package().items()
        if source.libraries & {"msgpack", "msgspec"} and not path.startswith("wire/")
    }
    ratchet(packing, dict.fromkeys(PACKS_BY_HAND, 1), remedy="Declare the message in wire/, and import it from there.")


def test_every_event_happens():
    called = set().union(*(source.called for source in package().values()))
    events = [name for source in package().values() for name in source.events]
    assert len(events) > 40, f"the events are read wrongly: {events}"
    never = {name: 1 for name in events if name not in called}
    ratchet(
        never, dict.fromkeys(NEVER_HAPPENS, 1), remedy="Nothing constructs it: tell it where it happens, or delete it."
    )


def test_a_glossary_word_has_one_row():
    rows = Counter(
        word.strip() for words, *_ in _table("| word | meaning |") for word in re.split(r"[,()]", words) if word.strip()
    )
    assert len(rows) > 30, f"the glossary is read wrongly: {rows}"
    twice = {word: number for word, number in rows.items() if number > 1}
    ratchet(twice, TWO_ROWS, least=2, remedy="One word, one thing: find another word for one of them.")


def test_a_pure_module_reads_no_clock():
    pure = pure_modules()
    assert len(pure) > 50, f"the table of pure modules is read wrongly: {sorted(pure)}"
    clocks = {path: package()[path].clocks for path in sorted(pure) if package()[path].clocks}
    remedy = "It is called pure: take the time as a parameter, and let its shell read the clock."
    ratchet(dict.fromkeys(clocks, 1), dict.fromkeys(READS_A_CLOCK, 1), where=clocks, remedy=remedy)


def test_a_module_has_at_most_500_lines():
    long = {path: source.num_lines for path, source in package().items() if source.num_lines > MAX_LINES}
    remedy = f"Find the part that wants out, and give it a module of its own (at most {MAX_LINES} lines each)."
    ratchet(long, {}, least=MAX_LINES + 1, remedy=remedy)


def test_tests_touch_nothing_private_of_another_object():
    private = {path: source.private for path, source in files_of_tests().items() if source.private}
    remedy = "Test it through what its callers see, or make the part public that wants a test of its own."
    ratchet({path: len(what) for path, what in private.items()}, PRIVATE, where=private, remedy=remedy)


PUZZLES = re.compile(r"""(?:^|[.:;|]\s+|\"\"\"|\#\s)((?:Who|Of the)\s[^.]{0,40})""", re.MULTILINE)


@pytest.mark.parametrize(
    "path", [*sorted(PACKAGE.rglob("*.py")), *sorted(REPOSITORY.glob("*.md")), *sorted(REPOSITORY.glob("docs/*.md"))],
    ids=lambda path: str(path.relative_to(REPOSITORY)),
)  # fmt: skip
def test_no_sentence_begins_with_who_or_of_the(path: Path):
    """Its subject comes late or never: a reader has to begin again."""
    text = "\n".join(line for line in path.read_text().splitlines() if "](" not in line and not line.startswith("## "))
    assert PUZZLES.findall(text) == []


# -- the reader itself -------------------------------------------------------------------------------------------------


OFFENDER = """'A module that breaks the rules. Pure.'
import msgpack, time
from time import monotonic as now
from dilocox_peer.cli.join import _keep
class Twice: ...
class Happened(Event): ...
Alias = list[int]
class Reader:
    def __init__(self, clock=time.time): self._mine = Happened()
    def look(self, other, loop):
        time.localtime(5), time.strftime('%H', time.gmtime(5)), self._mine, self.__class__
        return other._theirs, super()._ours(), setattr(other, '_theirs', 1), loop.time(), time.localtime()
"""


def test_the_reader_sees_what_offends_and_nothing_else():
    found = read(OFFENDER)
    assert sorted(found.names) == ["Alias", "Happened", "Reader", "Twice"]
    assert found.events == ["Happened"]
    assert "Happened" in found.called
    assert "msgpack" in found.libraries
    assert found.clocks == {"time.time", "time.monotonic", "time.localtime", "loop.time"}
    assert sorted(found.private) == ["dilocox_peer.cli.join._keep", "other._theirs", "other._theirs"]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"new": 1, "old": 2}, "new: 1, 0 listed: somewhere"),
        ({"old": 3}, "old: 3, 2 listed: here, there"),
        ({"old": 1}, "old: write 1"),
        ({}, "old: take it off the list"),
    ],
)
def test_a_ratchet_turns_one_way(found: dict[str, int], says: str):
    where = {"old": ["there", "here"], "new": ["somewhere"]}
    ratchet({"old": 2}, {"old": 2}, where=where, remedy="mend it")
    with pytest.raises(AssertionError, match=re.escape(says)):
        ratchet(found, {"old": 2}, where=where, remedy="mend it")
