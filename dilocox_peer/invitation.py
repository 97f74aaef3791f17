"""Invitation links and the multiaddresses in them: `dilocox://<run id>@<multiaddr>[,<multiaddr>...][#invite=<grant>]`.

Only text is checked here, with the standard library, signing.py and the form of admission.py's grants; nothing is resolved or
dialled. A volunteer sees these messages first, so each says which part is wrong and what to do. The grant stands behind a
`#`, not a `?`: a shell may take that for a pattern, and a link is pasted as it is.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import base58

from dilocox_peer.admission import MAX_GRANT_CHARS, Grant
from dilocox_peer.errors import ConfigError, RunRefused
from dilocox_peer.signing import public_key_of
from dilocox_peer.types import PeerId, RunId

SCHEME = "dilocox://"
RUN_ID_CHARS = 64
INVITE_MARK = "#invite="
MAX_LINK_CHARS = 4096 + len(INVITE_MARK) + MAX_GRANT_CHARS
MAX_LINK_ADDRESSES = 16
MAX_ADDRESS_CHARS = 512  # a relayed address with two PeerIDs and a long host name stays below

_DNS_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_-]{1,63})*\.?\Z")
# https://github.com/multiformats/multiaddr/blob/master/protocols.csv, as varints
_CODES = {
    "ip4": b"\x04", "tcp": b"\x06", "ip6": b"\x29", "dns4": b"\x36", "dns6": b"\x37",
    "p2p": b"\xa5\x03", "p2p-circuit": b"\xa2\x02",
}  # fmt: skip
_EXAMPLE = "/ip4/203.0.113.5/tcp/31337"

AddressRole = Literal["peer", "lease", "listen", "announce"]
"""What an address is for: peer: somebody to dial (--initial-peers, links); lease: the same or through a relay;
listen: --host-maddrs; announce: --announce-maddrs."""


@dataclass(frozen=True, slots=True)
class Address:
    """A multiaddress taken apart.

    peer: whose it is, None in the roles listen and announce. relay: who passes on to peer, None if dialled directly.
    """

    text: str
    host_kind: str
    host: str
    port: int
    peer: PeerId | None
    relay: PeerId | None = None

    @property
    def is_relayed(self) -> bool:
        return self.relay is not None

    def dialled_bytes(self) -> bytes:
        """libp2p's binary form of where to dial for peer, peer itself not in it.

        hivemind's Multiaddr writes a PeerID as a CID, which the libp2p of its p2pd cannot read [m].
        """
        match self.host_kind:
            case "ip4" | "ip6":
                host = _CODES[self.host_kind] + ipaddress.ip_address(self.host).packed
            case _:
                name = self.host.encode("ascii")
                host = _CODES[self.host_kind] + _varint(len(name)) + name
        where = host + _CODES["tcp"] + self.port.to_bytes(2, "big")
        if self.relay is None:
            return where
        relay: bytes = base58.b58decode(self.relay)
        return where + _CODES["p2p"] + _varint(len(relay)) + relay + _CODES["p2p-circuit"]


@dataclass(frozen=True, slots=True)
class Invitation:
    """What a volunteer needs to find a run: which one, and somebody who is in it. grant: of a run that is not open."""

    run_id: RunId
    addresses: tuple[str, ...]
    grant: Grant | None = None

    @property
    def link(self) -> str:
        return format_invitation(self)


def format_invitation(invitation: Invitation) -> str:
    """The link of an invitation; `parse_invitation` takes it back."""
    link = f"{SCHEME}{invitation.run_id}@{','.join(invitation.addresses)}"
    return link if invitation.grant is None else f"{link}{INVITE_MARK}{invitation.grant.to_text()}"


def parse_invitation(text: str) -> Invitation:
    """The invitation in a link. Raises ConfigError that names the part that is wrong and the remedy, RunRefused where the
    grant in it is for another run."""
    link = text.strip().strip("<>\"'").strip()
    if len(link) > MAX_LINK_CHARS:
        raise ConfigError(
            f"an invitation link has at most {MAX_LINK_CHARS} characters, this has {len(link)}: paste the link alone"
        )
    if link[: len(SCHEME)].lower() != SCHEME:
        raise ConfigError(
            f"{_shown(link)} is no invitation link: it begins with {SCHEME}; paste the line that `bootstrap` printed"
        )
    link, mark, fragment = link.partition("#")
    run_id, at, addresses = link[len(SCHEME) :].partition("@")
    if not at:
        raise ConfigError("the invitation link ends before '@' and the addresses: copy it whole")
    run_id = run_id.lower()
    if len(run_id) != RUN_ID_CHARS:
        raise ConfigError(f"the run id in the link has {len(run_id)} of {RUN_ID_CHARS} characters: copy the link whole")
    if re.fullmatch(r"[0-9a-f]+", run_id) is None:
        raise ConfigError(f"the run id in the link, {_shown(run_id)}, is not hexadecimal: copy the link again")
    parts = [part for part in addresses.split(",") if part]
    if not parts:
        raise ConfigError("the invitation link names no address after '@': copy it whole")
    if len(parts) > MAX_LINK_ADDRESSES:
        raise ConfigError(
            f"the invitation link names {len(parts)} addresses, at most {MAX_LINK_ADDRESSES} are read: shorten it"
        )
    texts = tuple(parse_multiaddr(part, "peer").text for part in parts)
    return Invitation(RunId(run_id), texts, _grant(mark + fragment, RunId(run_id)) if mark else None)


def _grant(text: str, run_id: RunId) -> Grant:
    """The grant at the end of a link to that run."""
    if not text.startswith(INVITE_MARK):
        raise ConfigError(f"the link ends with {_shown(text)}, where only {INVITE_MARK}... may stand: copy it again")
    try:
        grant = Grant.from_text(text[len(INVITE_MARK) :])
    except ValueError as error:
        raise ConfigError(f"the invitation at the end of the link is damaged ({error}): copy the link whole") from None
    if grant.run_id != run_id:
        raise RunRefused(
            f"the invitation at the end of the link is for run {grant.run_id[:12]}, the link is to run {run_id[:12]}: "
            "ask the run's owner for an invitation to this one"
        )
    return grant


def parse_multiaddrs(texts: Iterable[str], role: AddressRole) -> tuple[str, ...]:
    """The checked addresses of an option that takes several, in order, without repetitions."""
    return tuple(dict.fromkeys(parse_multiaddr(text, role).text for text in texts))


def parse_multiaddr(text: str, role: AddressRole) -> Address:
    """The address in text, fit for its role. Raises ConfigError with one line that names text and the remedy."""
    text = text.strip()
    if len(text) > MAX_ADDRESS_CHARS:
        raise ConfigError(f"an address has at most {MAX_ADDRESS_CHARS} characters, {_shown(text)} has {len(text)}")
    if not text.startswith("/"):
        raise ConfigError(f"{_shown(text)} is no multiaddress: write it as {_example(role)}")
    parts = text.rstrip("/").split("/")[1:]
    if len(parts) < 4 or parts[2] != "tcp":
        raise ConfigError(f"address {_shown(text)} is not /HOST-KIND/HOST/tcp/PORT...: write it as {_example(role)}")
    host_kind, host, _tcp, port_text, *tail = parts
    _check_host(text, host_kind, host, role)
    port = _port(text, port_text, role)
    if role in ("listen", "announce"):
        if tail:
            raise ConfigError(f"address {_shown(text)} goes on after the port: write {text.partition('/p2p')[0]} alone")
        return Address(text, host_kind, host, port, None)
    if not tail or tail[0] != "p2p":
        raise ConfigError(f"address {_shown(text)} lacks /p2p/PEER-ID at its end: copy it whole, as {_example(role)}")
    if len(tail) == 2:
        return Address("/" + "/".join(parts), host_kind, host, port, _peer_id(text, tail[1]))
    if role == "lease" and len(tail) == 5 and tail[2:4] == ["p2p-circuit", "p2p"]:
        relay = _peer_id(text, tail[1])
        return Address("/" + "/".join(parts), host_kind, host, port, _peer_id(text, tail[4]), relay)
    raise ConfigError(f"address {_shown(text)} goes on after the PeerID: write it as {_example(role)}")


def address_range(host: str) -> str:
    """The range of addresses that host lies in, /24 of IPv4 and /48 of IPv6: who holds one of it easily holds more. Empty for
    names, and for addresses of a machine or a house, where everybody shares one."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    if not address.is_global:
        return ""
    return str(ipaddress.ip_network((address, 24 if address.version == 4 else 48), strict=False))


def place_of(host: str) -> str:
    """What budgets are counted by, beside peers: `address_range` of a public host, the host itself within a house. Empty for names,
    and for this computer, where all that comes through p2pd to linkd comes from."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    return "" if address.is_loopback else address_range(host) or str(address)


def with_any_port(maddrs: Iterable[str]) -> tuple[str, ...]:
    """Listening addresses on the same hosts, at ports of the system's choice, each host once."""
    hosts = dict.fromkeys(
        (address.host_kind, address.host) for address in (parse_multiaddr(text, "listen") for text in maddrs)
    )
    return tuple(f"/{kind}/{host}/tcp/0" for kind, host in hosts)


def all_loopback(maddrs: Iterable[str]) -> bool:
    """Whether none of the addresses is of use to another machine."""
    return all(text.startswith(("/ip4/127.", "/ip6/::1/")) for text in maddrs)


def with_port_raised(maddrs: Iterable[str], role: AddressRole, by: int) -> tuple[str, ...]:
    """The addresses with a port higher by so much; port 0, any, stays. Raises ConfigError when there is no such port."""
    raised = []
    for address in (parse_multiaddr(text, role) for text in maddrs):
        port = address.port + by if address.port else 0
        if port > 65535:
            raise ConfigError(f"{address.text}: there is no port {port} for run number {by + 1}; pass a lower one")
        raised.append(f"/{address.host_kind}/{address.host}/tcp/{port}")
    return tuple(raised)


def visible_at(listening: Iterable[str], seen_at: Iterable[str], peer: PeerId) -> tuple[str, ...]:
    """Addresses to dial `peer` at: the ports it listens on, at the hosts where another service of the same machine is seen.

    listening: may name 0.0.0.0, which nobody can dial. seen_at: of the other service; relayed ones say nothing of hosts.
    """
    ports = dict.fromkeys(parse_multiaddr(text.partition("/p2p/")[0], "listen").port for text in listening)
    services = [parse_multiaddr(text, "lease") for text in seen_at]
    hosts = dict.fromkeys((each.host_kind, each.host) for each in services if not each.is_relayed)
    return tuple(f"/{kind}/{host}/tcp/{port}/p2p/{peer}" for kind, host in hosts for port in ports)


def _varint(number: int) -> bytes:
    """number below 16384, as multiaddresses count."""
    return bytes([number]) if number < 128 else bytes([number & 127 | 128, number >> 7])


def _check_host(text: str, host_kind: str, host: str, role: AddressRole) -> None:
    match host_kind:
        case "ip4" | "ip6":
            try:  # a zone (fe80::1%eth0) is of one machine, and no multiaddress: p2pd ends at it
                valid = "%" not in host and ipaddress.ip_address(host).version == int(host_kind[-1])
            except ValueError:
                valid = False
            if not valid:
                raise ConfigError(f"address {_shown(text)}: {_shown(host)} is no IPv{host_kind[-1]} address")
            if role != "listen" and ipaddress.ip_address(host).is_unspecified:
                raise ConfigError(
                    f"address {_shown(text)}: nobody can dial {host}; write the address others reach this host at"
                )
        case "dns4" | "dns6":
            if role == "listen":
                raise ConfigError(
                    f"address {_shown(text)}: listening takes /ip4 or /ip6, not a name; use /ip4/0.0.0.0/tcp/PORT"
                )
            if _DNS_NAME.match(host) is None:
                raise ConfigError(f"address {_shown(text)}: {_shown(host)} is no host name")
        case _:
            raise ConfigError(
                f"address {_shown(text)} begins with /{host_kind}: use /ip4, /ip6, /dns4 or /dns6, as {_example(role)}"
            )


def _port(text: str, port_text: str, role: AddressRole) -> int:
    lowest = 0 if role == "listen" else 1
    port = int(port_text) if re.fullmatch(r"[0-9]{1,5}", port_text) else -1
    if not lowest <= port <= 65535:
        raise ConfigError(
            f"address {_shown(text)}: the port is {_shown(port_text)}, not a number from {lowest} to 65535"
        )
    return port


def _peer_id(text: str, peer: str) -> PeerId:
    try:
        public_key_of(PeerId(peer))
    except ValueError:
        raise ConfigError(
            f"address {_shown(text)}: {_shown(peer)} is no Ed25519 PeerID (12D3KooW...): copy it whole"
        ) from None
    return PeerId(peer)


def _example(role: AddressRole) -> str:
    return f"{_EXAMPLE}/p2p/12D3KooW..." if role in ("peer", "lease") else _EXAMPLE


def _shown(text: str) -> str:
    """text for a message: quoted, one line, not endless."""
    clean = "".join(character if character.isprintable() else "?" for character in text)
    return f"'{clean}'" if len(clean) <= 80 else f"'{clean[:60]}...'"
