"""How often addresses are dialled that nothing but a lease names. Pure; now is in seconds, of any clock that does not go back.

A lease says of any address that its peer is there, and costs nothing. So that strangers cannot have all peers of a run dial a third party, what is
dialled for peers that were never heard is bounded for each range of addresses, over all addresses of all leases.
"""

from collections import Counter, OrderedDict
from collections.abc import Container, Sequence

from dilocox_peer.errors import PeerUnavailable
from dilocox_peer.invitation import Address, place_of
from dilocox_peer.token_bucket import TokenBucket
from dilocox_peer.types import PeerId

OF_A_LEASE = 2  # addresses of one range
RANGE_LEADS, RANGE_LEADS_PER_S = 96.0, 1.0  # a run may have all its peers in one data centre
MAX_RANGES = 1024  # the longest undialled is forgotten


class TooManyLeads(PeerUnavailable):
    """The peer was not dialled: too many leases lead where it is said to be. Another time it may be."""


class LeadBudget:
    """See the module."""

    def __init__(self) -> None:
        self._ranges: OrderedDict[str, TokenBucket] = OrderedDict()

    def allowed(self, addresses: Sequence[Address], known: Container[PeerId], now: float) -> list[Address]:
        """Those that may be dialled now, which count as dialled. known: peers that were heard; a way through such a relay dials nobody else."""
        found, of_range = list[Address](), Counter[str]()
        for address in addresses:
            place = "names" if address.host_kind.startswith("dns") else place_of(address.host)
            is_free = not place or (address.relay is not None and address.relay in known)
            if is_free or (of_range[place] < OF_A_LEASE and self._bucket(place, now).try_take(1.0, now)):
                found.append(address)
                of_range[place] += 1
        return found

    def _bucket(self, place: str, now: float) -> TokenBucket:
        bucket = self._ranges.setdefault(place, TokenBucket(RANGE_LEADS_PER_S, RANGE_LEADS, now))
        self._ranges.move_to_end(place)
        while len(self._ranges) > MAX_RANGES:
            self._ranges.popitem(last=False)
        return bucket
