"""At which address our own connections come out on the Internet, by what others tell of it. Pure.

Those whom the run's link names are believed, if those of them that tell do not contradict one another; others only where no named one
tells, and two of them say the same. Ports that differ by who looks are of a router that nobody can be dialled behind: nothing is
believed then. A liar could otherwise have us and those who dial us knock at a stranger's door.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from dilocox_peer.errors import ConfigError
from dilocox_peer.invitation import address_range, parse_multiaddr
from dilocox_peer.types import PeerId

REMEMBERED_S = 300.0
MAX_TELLERS = 16
STRANGERS = 2  # that have to agree


@dataclass
class OutsideView:
    """See the module."""

    _told: OrderedDict[PeerId, tuple[float, bool, str]] = field(default_factory=OrderedDict)

    def told(self, by: PeerId, address: str, now: float, *, is_named: bool) -> None:
        """address: a multiaddress without a PeerID; anything but one of TCP over IPv4 on the Internet is passed over."""
        try:
            parsed = parse_multiaddr(address, "announce")
        except ConfigError:
            return
        if parsed.host_kind != "ip4" or not address_range(parsed.host):
            return
        self._told[by] = (now, is_named, parsed.text)
        self._told.move_to_end(by)
        while len(self._told) > MAX_TELLERS:
            self._told.popitem(last=False)

    def forget(self) -> None:
        """We are elsewhere."""
        self._told.clear()

    @property
    def hosts(self) -> frozenset[str]:
        """All that were told."""
        return frozenset(parse_multiaddr(text, "announce").host for _, _, text in self._told.values())

    def believed(self, now: float) -> str | None:
        """The address, if there is one to believe."""
        lately = [(is_named, text) for at, is_named, text in self._told.values() if now - at <= REMEMBERED_S]
        named = [text for is_named, text in lately if is_named]
        others = [text for is_named, text in lately if not is_named]
        if named:
            return named[0] if len(set(named)) == 1 else None
        return others[0] if len(others) >= STRANGERS and len(set(others)) == 1 else None
