"""Has a peer pause while this machine runs on its battery (battery.py)."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from dilocox_peer.cli.battery import Charge, Supply
from dilocox_peer.cli.hours import Pausable

SUPPLIES = Path("/sys/class/power_supply")
LOOK_S = 10.0
WHO = "on-battery"


def read_charge(supplies: Path = SUPPLIES) -> Charge | None:
    """None without a battery, and where the system does not tell of the plug. supplies: of Linux. Takes milliseconds."""
    try:
        if supplies.is_dir():
            return charge_of([_fields(each) for each in sorted(supplies.iterdir())])
        found = psutil.sensors_battery()
    except (OSError, ValueError, AttributeError, RuntimeError):  # files that come and go; a platform without
        return None
    if found is None or found.power_plugged is None:
        return None
    return Charge(float(found.percent), bool(found.power_plugged))


def charge_of(supplies: Sequence[Mapping[str, str]]) -> Charge | None:
    """From the fields of each power supply (Linux, Documentation/ABI/testing/sysfs-class-power). None: this machine has no battery, or it does not say.

    A mouse's battery is none of the machine's. A charger is told by whether it is online, whatever it is called; a battery that holds at a charge
    limit ("Not charging") is at one.
    """
    own = [each for each in supplies if each.get("scope") != "Device"]
    batteries = [each for each in own if each.get("type") == "Battery" and each.get("present") != "0"]
    chargers = [each["online"] for each in own if each.get("type") not in ("Battery", "UPS") and "online" in each]
    said = {each.get("status") for each in batteries}
    if any(online != "0" for online in chargers):
        is_plugged = True
    elif "Discharging" in said:
        is_plugged = False
    elif said & {"Charging", "Full", "Not charging"}:  # at a charger that Linux does not list
        is_plugged = True
    elif chargers:
        is_plugged = False
    else:
        return None
    known = [float(each["capacity"]) for each in batteries if each.get("capacity", "").isdecimal()]
    return Charge(sum(known) / len(known) if known else 0.0, is_plugged) if batteries else None


def _fields(supply: Path) -> dict[str, str]:
    found = {}
    for name in ("type", "scope", "online", "status", "capacity", "present"):
        with suppress(OSError, ValueError):  # a supply has some of them, and files come and go
            found[name] = (supply / name).read_text().strip()
    return found


async def keep_mains(
    peer: Pausable,
    read: Callable[[], Charge | None] = read_charge,
    *,
    look_s: float = LOOK_S,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Pauses while the machine runs on its battery, until cancelled."""
    supply = Supply()
    while True:
        was_on_battery = supply.is_on_battery
        charge = await asyncio.to_thread(read)
        if supply.take(charge, clock()) != was_on_battery:
            if supply.is_on_battery:
                percent = "" if charge is None else f" at {charge.percent:.0f} %"
                peer.pause(WHO, f"on battery{percent}; plugged in it goes on (--on-battery go: also without)")
            else:
                peer.resume(WHO, "the machine is plugged in again")
        await asyncio.sleep(look_s)
