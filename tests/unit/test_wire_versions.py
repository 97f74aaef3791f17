"""One policy for versions: what is refused, and who is told to update. That each thing is refused where it is read: the tests of each."""

import re
from pathlib import Path

import pytest

from dilocox_peer.wire import versions
from dilocox_peer.wire.versions import why_not_list, why_not_version, with_version, without_version

PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_the_older_of_the_two_must_update() -> None:
    assert why_not_version("a thing", 2, 2) is None
    assert why_not_version("a thing", 3, 2) == "a thing of version 3, this peer speaks 2: this peer must update"
    assert why_not_version("a thing", 1, 2) == "a thing of version 1, this peer speaks 2: who wrote it must update"


def test_a_version_goes_before_a_list_and_comes_off_again() -> None:
    assert with_version(2, b"\x91\x07") == b"\x92\x02\x07"
    assert without_version(b"\x92\x02\x07", 2, "a thing") == b"\x91\x07"


@pytest.mark.parametrize("raw", [b"", b"\x92", b"\x90\x02", b"\xdc\x00\x02\x02", b"\x82\x02\x07", b"\x92\xcc\x02\x07"])
def test_what_does_not_begin_with_a_version_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="no short list that begins with its version"):
        without_version(raw, 2, "a thing")
    assert why_not_list("a thing", raw, 2) is None  # for the parser to refuse


def test_a_version_may_stand_behind_a_name() -> None:
    name = b"\xa4name"
    assert why_not_list("a thing", b"\x92" + name + b"\x01", 1, name) is None
    assert why_not_list("a thing", b"\x92\xa4mane\x02", 1, name) is None
    reason = why_not_list("a thing", b"\x92" + name + b"\x02", 1, name)
    assert reason == "a thing of version 2, this peer speaks 1: this peer must update"


def test_the_table_of_versions_is_up_to_date() -> None:
    _before, _title, after = PROTOCOL.read_text().partition("| what | version now |")
    said = sorted(
        int(number) for number in re.findall(r"^\|[^|]+\| (\d+) \|", after.partition("\n\n")[0], re.MULTILINE)
    )
    known = sorted(value for name, value in vars(versions).items() if name.isupper())
    assert said == known
