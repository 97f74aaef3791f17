"""The addresses of this computer that it sends from, as the system's routes say. Nothing is sent."""

import socket

_FAR = ((socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1"))  # of no line that is ours


def own_hosts() -> list[str]:
    """One of each family that has a way out; none while there is no line."""
    found = []
    for family, far in _FAR:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((far, 9))
                found.append(str(probe.getsockname()[0]))
        except OSError:
            continue
    return found
