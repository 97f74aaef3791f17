"""Who joins with a clock that is off is told so as soon as the settings do not come at once."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox_peer.cli.visit import Visit
from dilocox_peer.config import preset
from dilocox_peer.errors import RunUnreachable
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.arrival import ClockOff, settings_or_why_not, why_clock
from dilocox_peer.signing import SigningKey

SETTINGS = preset("tiny")


@pytest.fixture(autouse=True)
def nothing_comes_at_once(monkeypatch):
    monkeypatch.setattr("dilocox_peer.peer.arrival.AT_ONCE_S", 0.0)
    monkeypatch.setattr("dilocox_peer.peer.arrival.SLOWLY_S", 1.0)


async def never() -> Manifest:
    await asyncio.Event().wait()
    raise AssertionError


async def nobody() -> Manifest:
    raise RunUnreachable("nobody here knows the run")


async def right() -> str | None:
    return None


async def off() -> str | None:
    return "this computer's clock is 60 s behind"


async def test_settings_that_come_are_taken_whatever_the_clock():
    async def come() -> Manifest:
        return SETTINGS

    async def asked_in_vain() -> str | None:
        for _ in range(3):  # they come while it is asked for
            await asyncio.sleep(0)
        return await off()

    assert await settings_or_why_not(come(), asked_in_vain) is SETTINGS


async def test_a_clock_that_is_off_is_told_before_the_directory_has_given_up():
    with pytest.raises(ClockOff, match="60 s behind"):
        await asyncio.wait_for(settings_or_why_not(never(), off), 30.0)


async def test_settings_that_a_slow_line_brings_are_taken_whatever_the_clock():
    """`status` on a computer 25 s off, over a line on which they take two seconds, was told to set its clock."""

    async def slowly() -> Manifest:
        await asyncio.sleep(0.2)
        return SETTINGS

    assert await settings_or_why_not(slowly(), off) is SETTINGS


async def test_settings_that_are_here_do_not_wait_for_a_bootstrap_that_is_gone():
    ended: list[bool] = []

    async def silent() -> str | None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return None

    async def slowly() -> Manifest:
        await asyncio.sleep(0.05)
        return SETTINGS

    assert await asyncio.wait_for(settings_or_why_not(slowly(), silent), 10.0) is SETTINGS
    assert ended == [True]


async def test_a_clock_that_the_directory_puts_up_with_is_not_why(monkeypatch):
    async def asked(_transport: object, _peer: object) -> tuple[None, float]:
        return None, 25.0

    monkeypatch.setattr("dilocox_peer.peer.arrival.ask_how_it_is", asked)
    assert await why_clock(cast("Any", SimpleNamespace(named={SigningKey(b"b" * 32).peer_id}))) is None


async def test_where_the_clock_is_right_the_directorys_own_word_counts():
    with pytest.raises(RunUnreachable, match="nobody here knows"):
        await settings_or_why_not(nobody(), right)
    with pytest.raises(ClockOff):
        await settings_or_why_not(nobody(), off)


async def test_settings_that_come_late_are_waited_for():
    async def late() -> Manifest:
        for _ in range(10):
            await asyncio.sleep(0)
        return SETTINGS

    assert await settings_or_why_not(late(), right) is SETTINGS


@pytest.mark.parametrize(("ahead_s", "side"), [(172_800.0, "behind"), (-172_800.0, "ahead of")])
async def test_who_only_reads_is_told_of_the_clock_too(monkeypatch, ahead_s, side):
    """It was told that nobody knows the run, which may be over."""

    async def asked(_transport: object, _peer: object) -> tuple[None, float]:
        return None, ahead_s

    monkeypatch.setattr("dilocox_peer.peer.arrival.ask_how_it_is", asked)
    transport = SimpleNamespace(named={SigningKey(b"b" * 32).peer_id})
    directory = SimpleNamespace(fetch_manifest=lambda _timeout_s: nobody())
    visit = Visit(cast("Any", transport), cast("Any", directory), cast("Any", None), None, Path())
    with pytest.raises(ClockOff, match=f"clock is 172800 s {side} .*bootstrap's owner has to set that one's"):
        await visit.settings()
