"""What the pipeline sends and receives, and what the links carry for it. Pure."""

from dilocox_peer.network.link import LinkdTraffic


class LinkTraffic:
    """sent, received: payload, headers included; counted by whoever sends and takes it."""

    def __init__(self) -> None:
        self.sent = 0
        self.received = 0
        self._last = self._before = LinkdTraffic(0, 0)  # of this linkd, and of those that ended
        self._beyond_sent = self._beyond_received = 0

    def told(self, traffic: LinkdTraffic) -> None:
        """linkd's count of its connections' bytes. It comes less often than payload is counted, so what is kept is the
        difference."""
        self._last = traffic
        self._beyond_sent = max(0, self._before.sent + traffic.sent - self.sent)
        self._beyond_received = max(0, self._before.received + traffic.received - self.received)

    def ended(self) -> None:
        """linkd did: the next one counts from 0."""
        self._before = LinkdTraffic(self._before.received + self._last.received, self._before.sent + self._last.sent)
        self._last = LinkdTraffic(0, 0)

    @property
    def wire_sent(self) -> int:
        """0 before linkd has told."""
        return self.sent + self._beyond_sent if self._beyond_sent else 0

    @property
    def wire_received(self) -> int:
        """0 before linkd has told."""
        return self.received + self._beyond_received if self._beyond_received else 0
