"""natlab: homes behind NAT routers, in network namespaces of this machine. Needs root, iproute2 and nftables.

The Internet here is one Ethernet segment, 31.0.0.0/16 and 2a01:100::/32: addresses that programs take for public ones, which
the ranges for documentation are not. Nothing of it is connected with the machine's own network.

    with NatLab() as lab:
        lab.public("boot", 9)                          # 31.0.0.9
        lab.home("a", 1, Router.RESTRICTED)            # 192.168.1.2 behind a router at 31.0.1.1
        lab.carrier("isp", 50)                         # a carrier's NAT at 31.0.50.1
        lab.home("c", 3, behind="isp")                 # its router has 100.64.50.2
        lab.start()
        lab.popen("a", ["python", "peer.py"], stdout=log)

A home is a router's namespace and a host's, joined by a cable. All links are as fast as the machine goes, unless `set_rate` says
otherwise, and without delay, unless the lab has one.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from testbed import netlab
from testbed.netlab import mac, remove, sh

PREFIX = "natlab"  # namespaces are named natlab<pid of the owner>-NAME
QUEUE_MS = 100  # of a home's line, as time; a bloated one has more
INTERNET, INTERNET_6 = "31.0.0.0/16", "2a01:100::/32"


class Router(StrEnum):
    """What a home's router does with a new flow, outgoing and incoming."""

    FULL_CONE = "full cone"  # every incoming flow goes to the host (a "DMZ host", or ports opened by hand)
    RESTRICTED = "restricted"  # the port is kept, and only who was sent to may answer: most routers at home
    SYMMETRIC = "symmetric"  # another outside port for every flow: nobody can guess it
    REJECTS = "rejects"  # as restricted, but what comes unasked is answered with a reset


class Opens(StrEnum):
    """How a router may be asked to open a port: miniupnpd, with one of its protocols."""

    UPNP = "UPnP"
    NAT_PMP = "NAT-PMP"


IGD = "miniupnpd"  # Debian: miniupnpd-nftables


def missing() -> str | None:
    """What this machine lacks, in a few words; None if a lab can be set up."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    lacking = [program for program in ("ip", "nft", "tc") if shutil.which(program) is None]
    if lacking:
        return f"needs {', '.join(lacking)} (iproute2, nftables)"
    probe = f"{PREFIX}{os.getpid()}-probe"
    try:
        sh("ip", "netns", "add", probe)
    except RuntimeError:
        return "needs network namespaces, which this machine does not allow"
    sh("ip", "netns", "del", probe, check=False)
    return None


@dataclass
class _Port:
    """Where something is plugged into the Internet."""

    index: int
    delay_ms: float


@dataclass
class _Carrier:
    space: str
    number: int
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(2))


class NatLab:
    """See the module. Names are short: of letters and digits."""

    def __init__(self, *, delay_ms: float = 0.0) -> None:
        """delay_ms: one way, of each link to the Internet; a packet takes two of them."""
        self._delay_ms = delay_ms
        self._name = f"{PREFIX}{os.getpid()}"
        self._hub = self._space("hub")
        self._spaces: list[str] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._ports: dict[str, _Port] = {}  # of a namespace
        self._prefixes: list[tuple[str, str, str]] = []  # (IPv6 prefix, gateway, the gateway's namespace)
        self._carriers: dict[str, _Carrier] = {}
        self._routers: dict[str, str] = {}  # of a home, by its name
        self._opening: dict[str, Opens] = {}  # routers that open ports
        self._folder = tempfile.TemporaryDirectory(prefix=f"{self._name}-")

    def __enter__(self) -> Self:
        sweep()
        try:
            self._add("hub")
            if not self._delay_ms:
                sh("ip", "-n", self._hub, "link", "add", "br0", "type", "bridge")
                sh("ip", "-n", self._hub, "link", "set", "br0", "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- who is there -----------------------------------------------------------------------------------------------------

    def public(self, name: str, number: int, *, ipv4: bool = True, ipv6: bool = False) -> None:
        """A host at 31.0.0.NUMBER and, with ipv6, 2a01:100::NUMBER."""
        space = self._add(name)
        self._plug(space, "eth0", f"31.0.0.{number}/16" if ipv4 else None, f"2a01:100::{number:x}/32" if ipv6 else None)

    def carrier(self, name: str, number: int, router: Router = Router.SYMMETRIC) -> None:
        """A carrier's NAT at 31.0.NUMBER.1, with 100.64.NUMBER.0/24 behind it."""
        space = self._add(name)
        self._plug(space, "wan", f"31.0.{number}.1/16", None)
        self._bridge(space, "lan", f"100.64.{number}.1/24")
        self._route(space, router, host=None)
        self._carriers[name] = _Carrier(space, number)

    def home(
        self,
        name: str,
        number: int,
        router: Router = Router.RESTRICTED,
        *,
        behind: str | None = None,
        only_port: int | None = None,
        idle_s: int | None = None,
        opens: Opens | None = None,
        forwards: int | None = None,
        ipv4: bool = True,
        ipv6: bool = False,
    ) -> None:
        """A host at 192.168.NUMBER.2 behind a router at 31.0.NUMBER.1, or behind a carrier's.

        only_port: the only TCP port outside that may be dialled. idle_s: after so long without a packet the router forgets a flow, and
        drops what comes then. opens: ports, for who asks so (needs miniupnpd); it begins with `start`. forwards: this TCP port alone leads to
        the host. ipv6: the host has 2a01:100:NUMBER:1::2 too, behind a stateful firewall.
        """
        outside = self._add(f"{name}-r")
        if behind is not None:
            self._plug_into_carrier(outside, self._carriers[behind])
        else:
            self._plug(
                outside,
                "wan",
                f"31.0.{number}.1/16" if ipv4 else None,
                f"2a01:100:{number:x}::1/32" if ipv6 else None,
            )
        self._bridge(outside, "lan", f"192.168.{number}.1/24" if ipv4 else None)
        inside = self._add(name)
        _cable(outside, "l0", inside, "eth0")
        sh("ip", "-n", outside, "link", "set", "l0", "master", "lan")
        if ipv4:
            sh("ip", "-n", inside, "addr", "add", f"192.168.{number}.2/24", "dev", "eth0")
            sh("ip", "-n", inside, "route", "add", "default", "via", f"192.168.{number}.1")
        if ipv6:
            within = f"2a01:100:{number:x}:1"
            sh("ip", "-n", outside, "addr", "add", f"{within}::1/64", "dev", "lan", "nodad")
            sh("ip", "-n", inside, "addr", "add", f"{within}::2/64", "dev", "eth0", "nodad")
            sh("ip", "-n", inside, "-6", "route", "add", "default", "via", f"{within}::1")
            self._prefixes.append((f"{within}::/64", f"2a01:100:{number:x}::1", outside))
        self._route(outside, router, host=f"192.168.{number}.2", only_port=only_port, idle_s=idle_s, forwards=forwards)
        self._routers[name] = outside
        if opens is not None:
            self._opening[outside] = opens

    def guest(self, name: str, home: str, last: int = 3) -> None:
        """Another host of that home, at 192.168.NUMBER.LAST, behind the same router."""
        outside = self._routers[home]
        [address] = [
            line.split()[3] for line in sh("ip", "-n", outside, "-o", "-4", "addr", "show", "dev", "lan").splitlines()
        ]
        base = address.rpartition("/")[0].rpartition(".")[0]
        inside = self._add(name)
        _cable(outside, f"l{last}", inside, "eth0")
        sh("ip", "-n", outside, "link", "set", f"l{last}", "master", "lan")
        sh("ip", "-n", inside, "addr", "add", f"{base}.{last}/24", "dev", "eth0")
        sh("ip", "-n", inside, "route", "add", "default", "via", f"{base}.1")

    def start(self) -> None:
        """Everybody is there: tells them the ways to the IPv6 homes, and starts the delays."""
        for prefix, gateway, outside in self._prefixes:
            for space in self._ports:
                if space != outside:
                    device = "wan" if space.endswith("-r") or space in self._carrier_spaces else "eth0"
                    sh("ip", "-n", space, "-6", "route", "replace", prefix, "via", gateway, "dev", device, check=False)
        for number, (space, opens) in enumerate(self._opening.items()):
            self._open_ports(space, opens, number)
        if not self._delay_ms:
            return
        ready, said = os.pipe()
        delays = ",".join(str(port.delay_ms) for port in self._ports.values())
        argv = [sys.executable, netlab.__file__, "--switch", "--delay-ms", delays]
        self._spawn(self._hub, argv, stdout=said, stderr=subprocess.STDOUT)
        os.close(said)
        with os.fdopen(ready) as answer:
            if "ready" not in (line := answer.readline()):
                raise RuntimeError(f"the delay switch did not start: {line}{answer.read()}")

    def set_rate(
        self, name: str, *, up: float | None = None, down: float | None = None, queue_ms: float = QUEUE_MS
    ) -> None:
        """Shapes the line of a home or of a public host, bits a second each way; queue_ms: what its queues hold."""
        space = self._routers.get(name, self._space(name))
        device = "wan" if name in self._routers else "eth0"
        port = f"p{self._ports[space].index}"
        for where, link, rate in ((space, device, up), (self._hub, port, down)):
            if rate is not None:
                burst = int(min(max(rate / 8 * 0.002, 8 * 1500), 256 << 10))
                limit = int(rate / 8 * queue_ms / 1e3 + burst + 4 * 1500)
                shape = ["tbf", "rate", f"{int(rate)}bit", "burst", burst, "limit", limit]
                sh("tc", "-n", where, "qdisc", "replace", "dev", link, "root", *shape)

    # -- what runs there --------------------------------------------------------------------------------------------------

    def command(self, name: str, argv: Sequence[str | Path]) -> list[str]:
        """The same command, run at that host."""
        return ["ip", "netns", "exec", self._space(name), *map(str, argv)]

    def popen(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        stdout: Any = subprocess.DEVNULL,
        stderr: Any = subprocess.STDOUT,
    ) -> subprocess.Popen[bytes]:
        """Starts it at that host, in a session of its own; `close` ends it."""
        return self._spawn(self._space(name), [str(each) for each in argv], env=env, stdout=stdout, stderr=stderr)

    def renumber(self, name: str, number: int) -> None:
        """Another line: the home's router has 31.0.NUMBER.1 from now on, and knows no flow of before."""
        space = self._routers[name]
        for line in sh("ip", "-n", space, "-o", "-4", "addr", "show", "dev", "wan").splitlines():
            sh("ip", "-n", space, "addr", "del", line.split()[3], "dev", "wan")
        sh("ip", "-n", space, "addr", "add", f"31.0.{number}.1/16", "dev", "wan")

    def rehouse(self, name: str, last: int) -> None:
        """Another address within the home: the host is 192.168.NUMBER.LAST from now on, as in another network."""
        space = self._space(name)
        [old] = [
            line.split()[3] for line in sh("ip", "-n", space, "-o", "-4", "addr", "show", "dev", "eth0").splitlines()
        ]
        base = old.rpartition("/")[0].rpartition(".")[0]
        sh("ip", "-n", space, "addr", "del", old, "dev", "eth0")
        sh("ip", "-n", space, "addr", "add", f"{base}.{last}/24", "dev", "eth0")
        sh("ip", "-n", space, "route", "replace", "default", "via", f"{base}.1")

    def set_mtu(self, name: str, mtu: int) -> None:
        """Of a home's line, outside of its router, which tells both ends so when they connect, as most routers do."""
        space = self._routers[name]
        sh("ip", "-n", space, "link", "set", "wan", "mtu", mtu)
        clamp = ["tcp", "flags", "syn", "tcp", "option", "maxseg", "size", "set", mtu - 40]
        sh("ip", "netns", "exec", space, "nft", "insert", "rule", "inet", "firewall", "through", *clamp)

    def connections(self, name: str, port: int) -> int:
        """Of TCP, open, from outside of that host to that port of it."""
        seen = sh(
            "ip", "netns", "exec", self._space(name), "ss", "-Htn", "state", "established", f"( sport = :{port} )"
        )
        return sum(not line.split()[-1].startswith(("127.", "[::1]")) for line in seen.splitlines())

    def bytes_sent(self, name: str) -> int:
        """Of all packets that have left a home's router, or a public host."""
        space, device = (self._routers[name], "wan") if name in self._routers else (self._space(name), "eth0")
        [told] = json.loads(sh("ip", "-n", space, "-s", "-j", "link", "show", "dev", device))
        return int(told["stats64"]["tx"]["bytes"])

    def pids(self, name: str) -> list[int]:
        """Of all processes at that host."""
        return [int(pid) for pid in sh("ip", "netns", "pids", self._space(name)).split()]

    def cut(self, name: str) -> None:
        """Takes the cable out of the wall."""
        self._plugged(name, "down")

    def plug_in(self, name: str) -> None:
        """Puts it back. Of a public host and of a router without IPv6."""
        self._plugged(name, "up")

    def _plugged(self, name: str, state: str) -> None:
        space = self._routers.get(name, self._space(name))
        sh("ip", "-n", self._hub, "link", "set", f"p{self._ports[space].index}", state)

    def close(self) -> None:
        """Ends what runs there and takes everything down."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            for child in self._children:
                if child.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child.pid, how)
            until = time.monotonic() + 8
            while time.monotonic() < until and any(child.poll() is None for child in self._children):
                time.sleep(0.05)
        for space in reversed(self._spaces):
            remove(space)
        self._spaces = []
        self._folder.cleanup()

    # -- how it is made ---------------------------------------------------------------------------------------------------

    def _space(self, name: str) -> str:
        return f"{self._name}-{name}"

    @property
    def _carrier_spaces(self) -> set[str]:
        return {carrier.space for carrier in self._carriers.values()}

    def _spawn(
        self, space: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, stdout: Any, stderr: Any
    ) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            ["ip", "netns", "exec", space, *argv],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        self._children.append(child)
        return child

    def _add(self, name: str) -> str:
        if re.fullmatch(r"[a-z0-9]+(-r)?", name) is None:
            raise ValueError(f"{name!r}: a name is made of small letters and digits")
        space = self._space(name)
        sh("ip", "netns", "add", space)
        self._spaces.append(space)
        sh("ip", "-n", space, "link", "set", "lo", "up")
        return space

    def _open_ports(self, space: str, opens: Opens, number: int) -> None:
        config = Path(self._folder.name) / f"igd{number}.conf"
        config.write_text(
            f"""
            ext_ifname=wan
            listening_ip=lan
            enable_upnp={"yes" if opens is Opens.UPNP else "no"}
            enable_natpmp={"yes" if opens is Opens.NAT_PMP else "no"}
            secure_mode=yes
            upnp_table_name=igd
            upnp_nat_table_name=igd
            lease_file={config}.leases
            uuid=00000000-0000-0000-0000-{number:012d}
            allow 1024-65535 0.0.0.0/0 1024-65535
            deny 0-65535 0.0.0.0/0 0-65535
        """.replace("            ", "")
        )
        _nft(space, IGD_RULES)
        self._spawn(
            space,
            [IGD, "-d", "-f", str(config), "-P", f"{config}.pid"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )

    def _plug(self, space: str, device: str, address: str | None, address_6: str | None) -> None:
        """Connects a device of that namespace with the Internet."""
        port = _Port(len(self._ports), self._delay_ms)
        self._ports[space] = port
        _cable(self._hub, f"p{port.index}", space, device, mac(port.index))
        if not self._delay_ms:
            sh("ip", "-n", self._hub, "link", "set", f"p{port.index}", "master", "br0")
        if address is not None:
            sh("ip", "-n", space, "addr", "add", address, "dev", device)
        if address_6 is not None:
            sh("ip", "-n", space, "addr", "add", address_6, "dev", device, "nodad")

    def _plug_into_carrier(self, space: str, carrier: _Carrier) -> None:
        host = next(carrier.numbers)
        _cable(carrier.space, f"c{host}", space, "wan")
        sh("ip", "-n", carrier.space, "link", "set", f"c{host}", "master", "lan")
        sh("ip", "-n", space, "addr", "add", f"100.64.{carrier.number}.{host}/24", "dev", "wan")
        sh("ip", "-n", space, "route", "add", "default", "via", f"100.64.{carrier.number}.1")

    def _bridge(self, space: str, name: str, address: str | None) -> None:
        sh("ip", "-n", space, "link", "add", name, "type", "bridge")
        sh("ip", "-n", space, "link", "set", name, "up")
        if address is not None:
            sh("ip", "-n", space, "addr", "add", address, "dev", name)

    def _route(
        self,
        space: str,
        router: Router,
        *,
        host: str | None,
        only_port: int | None = None,
        idle_s: int | None = None,
        forwards: int | None = None,
    ) -> None:
        knobs = ["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"]
        if idle_s is not None:
            tracked = "net.netfilter.nf_conntrack_tcp"
            knobs += [f"{tracked}_timeout_established={idle_s}", f"{tracked}_loose=0"]
        sh("ip", "netns", "exec", space, "sysctl", "-qw", *knobs)
        _nft(space, _rules(router, host=host, only_port=only_port, forwards=forwards))


IGD_RULES = """
    table inet igd {
      chain miniupnpd {}
      chain prerouting_miniupnpd {}
      chain postrouting_miniupnpd {}
      chain forward { type filter hook forward priority -1; policy accept; jump miniupnpd; }
      chain prerouting { type nat hook prerouting priority -101; policy accept; jump prerouting_miniupnpd; }
      chain postrouting { type nat hook postrouting priority 99; policy accept; jump postrouting_miniupnpd; }
    }
"""


def _nft(space: str, rules: str) -> None:
    subprocess.run(["ip", "netns", "exec", space, "nft", "-f", "-"], input=rules, text=True, check=True)


def _rules(router: Router, *, host: str | None, only_port: int | None, forwards: int | None) -> str:
    """What nft is told."""
    to_host = f'iifname "wan" dnat to {host}' if router is Router.FULL_CONE and host is not None else ""
    if forwards is not None:
        to_host = f'iifname "wan" tcp dport {forwards} dnat to {host}'
    how = "masquerade fully-random" if router is Router.SYMMETRIC else "masquerade"
    outgoing = "accept" if only_port is None else f"tcp dport {only_port} accept"
    return f"""
        table ip nat {{
          chain before {{
            type nat hook prerouting priority -100; policy accept;
            {to_host}
          }}
          chain after {{
            type nat hook postrouting priority 100; policy accept;
            oifname "wan" {how}
          }}
        }}
        table inet firewall {{
          chain to_router {{
            type filter hook input priority 0; policy {"accept" if router is Router.REJECTS else "drop"};
            iifname {{ "lo", "lan" }} accept
            ct state established,related accept
            meta l4proto {{ icmp, ipv6-icmp }} accept
          }}
          chain through {{
            type filter hook forward priority 0; policy drop;
            ct state established,related accept
            ct state invalid drop
            ct status dnat accept
            iifname "lan" oifname "wan" {outgoing}
            meta l4proto ipv6-icmp accept
          }}
        }}
    """


def _cable(space: str, device: str, other_space: str, other_device: str, address: str | None = None) -> None:
    """Joins the two namespaces, both ends up. address: the Ethernet address of the second end."""
    known = ["address", address] if address is not None else []
    ends = ["link", "add", other_device, "netns", other_space, *known, "type", "veth"]
    sh("ip", *ends, "peer", "name", device, "netns", space)
    sh("ip", "-n", space, "link", "set", device, "up")
    sh("ip", "-n", other_space, "link", "set", other_device, "up")


def sweep() -> None:
    """Removes what an earlier lab left behind when it was killed outright."""
    for line in sh("ip", "netns", "list").splitlines():
        found = re.match(rf"{PREFIX}(\d+)-", line)
        if found and not os.path.exists(f"/proc/{found[1]}"):
            remove(line.split()[0])
