"""Which names in a request's Host header mean us: what is served to a browser, or in reach of one, asks for them."""

import ipaddress
from contextlib import suppress


def is_own_host(header: str, host: str) -> bool:
    """Whether a request with this Host header means us: it names an address, localhost, or what we were told to listen on. A
    name of somebody else's that he has resolved to our address (DNS rebinding) is none of these."""
    name = header.rpartition(":")[0] if not header.endswith("]") and ":" in header else header
    if name.lower() in {"localhost", host.lower()}:
        return True
    with suppress(ValueError):
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        return True
    return False
