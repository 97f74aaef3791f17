"""Has a peer pause while this machine runs on its battery (battery.py)."""

import asyncio
import time
from collections.abc import Callable

import psutil

from dilocox_peer.cli.battery import Charge, Supply
from dilocox_peer.cli.hours import Pausable

LOOK_S = 10.0
WHO = "on-battery"


def read_charge() -> Charge | None:
    """None without a battery, and where the system does not tell of the plug. Takes milliseconds."""
    try:
        found = psutil.sensors_battery()
    except (OSError, ValueError, AttributeError, RuntimeError):  # files that come and go; a platform without
        return None
    if found is None or found.power_plugged is None:
        return None
    return Charge(float(found.percent), bool(found.power_plugged))


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
