"""When a machine counts as running on its battery, and what its peer is told."""

import asyncio
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dilocox_peer.cli.battery import MAINS_S, Charge, Supply
from dilocox_peer.cli.mains import LOOK_S, charge_of, keep_mains, read_charge

NOWHERE = Path("/nowhere")
OUT, IN = Charge(60.0, is_plugged=False), Charge(60.0, is_plugged=True)


def course(readings: list[Charge | None]) -> list[bool]:
    """What is found at looks LOOK_S apart."""
    supply = Supply()
    return [supply.take(each, LOOK_S * turn) for turn, each in enumerate(readings)]


def test_it_is_on_battery_at_the_first_look_without_the_plug():
    assert course([OUT]) == [True]
    assert course([IN, IN, OUT]) == [False, False, True]


def test_the_plug_has_to_stay_in_before_it_is_on_mains_again():
    looks = int(MAINS_S / LOOK_S)
    assert course([OUT, *[IN] * (looks + 1)]) == [True] * (looks + 1) + [False]


def test_a_loose_plug_is_battery():
    assert all(course([OUT, IN, IN, OUT, IN, IN, OUT, IN]))


def test_a_machine_without_a_battery_is_on_mains_always():
    assert not any(course([None] * 5))


def test_a_reading_that_fails_changes_nothing():
    assert course([OUT, None, None]) == [True, True, True]
    assert course([IN, None, None]) == [False, False, False]


@pytest.mark.parametrize(
    ("found", "charge"),
    [
        (None, None),
        (SimpleNamespace(percent=50.0, power_plugged=None), None),
        (SimpleNamespace(percent=50.0, power_plugged=False), Charge(50.0, is_plugged=False)),
        (SimpleNamespace(percent=99.0, power_plugged=True), Charge(99.0, is_plugged=True)),
    ],
)
def test_what_the_system_says_is_read(monkeypatch, found, charge):
    monkeypatch.setattr(psutil, "sensors_battery", lambda: found, raising=False)
    assert read_charge(NOWHERE) == charge


def test_a_system_that_cannot_say_has_no_battery(monkeypatch):
    def broken():
        raise FileNotFoundError("energy_now")

    monkeypatch.setattr(psutil, "sensors_battery", broken, raising=False)
    assert read_charge(NOWHERE) is None
    monkeypatch.delattr(psutil, "sensors_battery")
    assert read_charge(NOWHERE) is None


async def test_the_peer_is_paused_with_the_charge_and_resumed_once_the_plug_stays_in():
    told = []

    class Peer:
        def pause(self, who, why):
            told.append(("pause", who, why))

        def resume(self, who, why):
            told.append(("resume", who, why))

    readings = iter([IN, Charge(41.6, is_plugged=False), IN, IN])
    times = iter([0.0, 10.0, 20.0, 20.0 + MAINS_S])

    def read() -> Charge:
        for each in readings:
            return each
        raise LookupError("no more")

    with suppress(LookupError):
        await asyncio.wait_for(keep_mains(Peer(), read, look_s=0.0, clock=lambda: next(times)), 30.0)
    assert [(what, who) for what, who, _ in told] == [("pause", "on-battery"), ("resume", "on-battery")]
    assert "42 %" in told[0][2]


# ---- what Linux tells of --------------------------------------------------------------------------------------------

MOUSE = {"type": "Battery", "scope": "Device", "status": "Discharging", "capacity": "70", "online": "1"}


def battery(status: str, capacity: str = "80") -> dict[str, str]:
    return {"type": "Battery", "status": status, "capacity": capacity}


def charger(online: str, kind: str = "Mains") -> dict[str, str]:
    return {"type": kind, "online": online}


def test_a_mouse_is_no_battery_of_the_machine():
    """A desktop with a wireless mouse never trained."""
    assert charge_of([MOUSE]) is None
    assert charge_of([MOUSE, charger("1")]) is None
    assert charge_of([]) is None


@pytest.mark.parametrize("kind", ["Mains", "USB", "Wireless"])
def test_a_charger_counts_whatever_it_is_called(kind: str):
    assert charge_of([charger("0", kind), battery("Discharging")]) == Charge(80.0, is_plugged=False)
    for status in ("Not charging", "Charging", "Full", "Unknown", "Discharging"):
        assert charge_of([MOUSE, charger("1", kind), battery(status)]) == Charge(80.0, is_plugged=True)


def test_of_several_chargers_one_that_is_in_is_enough_and_of_several_batteries_all_are_counted():
    both = [charger("0"), charger("1", "USB"), battery("Discharging", "20"), battery("Full", "100")]
    assert charge_of(both) == Charge(60.0, is_plugged=True)


def test_without_a_charger_that_tells_the_battery_does():
    assert charge_of([battery("Not charging")]) == Charge(80.0, is_plugged=True)
    assert charge_of([battery("Discharging")]) == Charge(80.0, is_plugged=False)
    assert charge_of([battery("Unknown")]) is None
    assert charge_of([charger("0", "USB"), battery("Charging")]) == Charge(80.0, is_plugged=True), "at another plug"
    assert charge_of([charger("0"), battery("Unknown")]) == Charge(80.0, is_plugged=False)


def test_a_look_that_fails_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It ended the watch, and whoever looked again never went on."""

    def fails(_self: Path) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Path, "iterdir", fails)
    assert read_charge(tmp_path) is None


def test_the_files_are_read_as_they_are(tmp_path: Path):
    assert read_charge(tmp_path) is None
    for name, fields in (("BAT0", battery("Discharging")), ("ADP1", charger("0")), ("hidpp_battery_0", MOUSE)):
        (tmp_path / name).mkdir()
        for field, value in fields.items():
            (tmp_path / name / field).write_text(f"{value}\n")
    assert read_charge(tmp_path) == Charge(80.0, is_plugged=False)
    (tmp_path / "BAT0" / "capacity").write_bytes(b"\xff")
    assert read_charge(tmp_path) == Charge(0.0, is_plugged=False)
