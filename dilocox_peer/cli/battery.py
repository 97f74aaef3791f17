"""`--on-battery`: whether this machine counts as running on its battery. Pure; mains.py looks, pauses and resumes."""

from dataclasses import dataclass

MAINS_S = (
    30.0  # that the plug has to stay in before training goes on: a loose one, or a walk to another room, is no reason
)


@dataclass(frozen=True, slots=True)
class Charge:
    """What the battery of this machine has. percent: 0 to 100."""

    percent: float
    is_plugged: bool


class Supply:
    """What the readings say: on battery as soon as the plug is out, on mains once it has been in for MAINS_S. A machine that has no
    battery, or does not say, counts as on mains."""

    def __init__(self) -> None:
        self.is_on_battery = False
        self._plugged_at_s: float | None = None  # since when, while on battery

    def take(self, charge: Charge | None, at_s: float) -> bool:
        """is_on_battery from now on. None: the machine did not say; it is as it was. at_s: monotonic."""
        if charge is None:
            return self.is_on_battery
        if not charge.is_plugged:
            self.is_on_battery, self._plugged_at_s = True, None
        elif self.is_on_battery:
            if self._plugged_at_s is None:
                self._plugged_at_s = at_s
            self.is_on_battery = at_s - self._plugged_at_s < MAINS_S
        return self.is_on_battery
