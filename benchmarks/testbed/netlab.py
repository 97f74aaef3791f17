#!/usr/bin/env python3
"""netlab: run one command per emulated machine, every machine behind its own rate-limited link.

    sudo netlab.py --nodes 4 --rate 100mbit -- python train.py
    sudo netlab.py --nodes 2 --rate 50mbit,10mbit --delay-ms 20 --loss 0.001 -- ./peer

Every node is a network namespace with one interface, eth0, shaped in both directions by tbf.
The nodes meet in a hub namespace: on a Linux bridge or, when a delay or a loss is asked for, in a
user-space switch (this kernel family often lacks netem). Nothing touches the host's own network.

The command sees RANK, WORLD_SIZE, NODE_IP, PEER_IPS (comma list, by rank), MASTER_ADDR,
MASTER_PORT and GLOO_SOCKET_IFNAME. stdout+stderr go to LOGDIR/rank<i>.log. A JSON summary (exit
code, wall and CPU seconds, bytes and packets each way, drops) goes to stdout and LOGDIR/summary.json.
The exit status is 0 only if every rank exited 0. Needs root, iproute2 and Python 3.9+, nothing else.
"""

import argparse
import contextlib
import ctypes
import heapq
import itertools
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

SUBNET = "10.77.0."
PREFIX = "netlab"  # namespaces are named netlab<pid of the owner>-hub, netlab<pid>-0, netlab<pid>-1, ...
BITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}


def sh(*argv, check=True):
    done = subprocess.run([str(a) for a in argv], text=True, capture_output=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(map(str, argv))}: {done.stderr.strip()}")
    return done.stdout


def bits_per_second(rate):
    """'100mbit' -> 1e8"""
    found = re.fullmatch(r"([\d.]+)\s*([kmg]?)(?:bit)?(?:/s|ps)?", rate.strip().lower())
    if not found:
        raise ValueError(f"not a rate: {rate!r} (use e.g. 800kbit, 100mbit, 1gbit)")
    return float(found[1]) * BITS[found[2]]


def spread(value, count):
    """'a,b' over 4 nodes -> a, b, a, b"""
    return list(itertools.islice(itertools.cycle(str(value).split(",")), count))


class Lab:
    """`with Lab(4, rate="100mbit") as lab: lab.run(["python", "train.py"])`"""

    def __init__(
        self, nodes, rate=None, up=None, down=None, delay_ms="0", loss=0.0, queue_ms=100.0, congestion="cubic", mtu=1500
    ):
        self.nodes, self.loss, self.queue_ms, self.mtu = nodes, loss, queue_ms, mtu
        self.up = spread(up or rate, nodes) if up or rate else [None] * nodes
        self.down = spread(down or rate, nodes) if down or rate else [None] * nodes
        self.delays = [float(d) for d in spread(delay_ms, nodes)]
        self.congestion = congestion
        self.name = f"{PREFIX}{os.getpid()}"
        self.hub = f"{self.name}-hub"
        self.ips = [f"{SUBNET}{i + 1}" for i in range(nodes)]
        self.children = {}  # pid -> (rank or "switch", Popen)

    # -- topology -------------------------------------------------------------------------------
    def __enter__(self):
        sweep()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def ns(self, rank):
        return f"{self.name}-{rank}"

    def _build(self):
        for space in [self.hub, *map(self.ns, range(self.nodes))]:
            sh("ip", "netns", "add", space)
            knobs = ["net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1"]
            if self.congestion:
                knobs.append(f"net.ipv4.tcp_congestion_control={self.congestion}")
            sh("ip", "netns", "exec", space, "sysctl", "-qw", *knobs, check=False)
            sh("ip", "-n", space, "link", "set", "lo", "up")
        switched = any(self.delays) or self.loss
        if not switched:
            sh("ip", "-n", self.hub, "link", "add", "br0", "type", "bridge")
            sh("ip", "-n", self.hub, "link", "set", "br0", "up")
        for i, ip in enumerate(self.ips):
            node, port = self.ns(i), f"p{i}"
            sh(
                "ip",
                "link",
                "add",
                "eth0",
                "netns",
                node,
                "mtu",
                self.mtu,
                "address",
                mac(i),
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                self.hub,
            )
            sh("ip", "-n", self.hub, "link", "set", port, "mtu", self.mtu, "up")
            if not switched:
                sh("ip", "-n", self.hub, "link", "set", port, "master", "br0")
            sh("ip", "-n", node, "addr", "add", f"{ip}/24", "dev", "eth0")
            sh("ip", "-n", node, "link", "set", "eth0", "up")
            self.set_rate(i, self.up[i], self.down[i])
        if switched:
            ready, said = os.pipe()
            self._spawn(
                "switch",
                self.hub,
                [
                    sys.executable,
                    os.path.abspath(__file__),
                    "--switch",
                    "--delay-ms",
                    ",".join(map(str, self.delays)),
                    "--loss",
                    str(self.loss),
                ],
                dict(os.environ),
                said,
            )
            os.close(said)
            with os.fdopen(ready) as answer:
                if "ready" not in (line := answer.readline()):
                    raise RuntimeError(f"the delay switch did not start: {line}{answer.read()}")

    def set_rate(self, rank, up, down=None):
        """Shape a node's link; may be called while commands run. None: as fast as the machine goes."""
        for space, dev, rate in ((self.ns(rank), "eth0", up), (self.hub, f"p{rank}", down or up)):
            if rate is None:
                sh("tc", "-n", space, "qdisc", "del", "dev", dev, "root", check=False)
                continue
            bps = bits_per_second(rate)
            # A bucket of 2 ms, never under a few frames and never over 256 KiB: larger ones let a
            # short message through unshaped, smaller ones cost CPU (tbf splits each GSO frame).
            burst = int(min(max(bps / 8 * 0.002, 8 * self.mtu), 256 << 10))
            limit = int(bps / 8 * self.queue_ms / 1e3 + burst + 4 * self.mtu)
            sh(
                "tc",
                "-n",
                space,
                "qdisc",
                "replace",
                "dev",
                dev,
                "root",
                "tbf",
                "rate",
                f"{int(bps)}bit",
                "burst",
                burst,
                "limit",
                limit,
            )

    # -- processes ------------------------------------------------------------------------------
    def _spawn(self, key, space, argv, env, out):
        child = subprocess.Popen(
            ["ip", "netns", "exec", space, *argv],
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.children[child.pid] = (key, child)
        return child

    def environment(self, rank):
        return dict(
            os.environ,
            RANK=str(rank),
            LOCAL_RANK="0",
            WORLD_SIZE=str(self.nodes),
            NODE_IP=self.ips[rank],
            PEER_IPS=",".join(self.ips),
            MASTER_ADDR=self.ips[0],
            MASTER_PORT="29500",
            GLOO_SOCKET_IFNAME="eth0",
            PYTHONUNBUFFERED="1",
        )

    def spawn(self, rank, argv, log, **extra_env):
        """Start one command in one node; `run` or `wait` collects it."""
        with open(log, "ab") as out:
            return self._spawn(rank, self.ns(rank), argv, {**self.environment(rank), **extra_env}, out)

    def run(self, argv, logdir, timeout=None, keep_going=False):
        os.makedirs(logdir, exist_ok=True)
        logs = [os.path.join(logdir, f"rank{i}.log") for i in range(self.nodes)]
        for log in logs:
            open(log, "wb").close()
        before = [self.counters(i) for i in range(self.nodes)]
        for i in range(self.nodes):
            self.spawn(i, argv, logs[i])
        results = self.wait(timeout, keep_going)
        for i, result in results.items():
            after = self.counters(i)
            result.update({k: after[k] - before[i][k] for k in after}, log=logs[i])
        return [results[i] for i in sorted(results)]

    def wait(self, timeout=None, keep_going=False, grace=5.0):
        """Wait for all commands. After a failure or the timeout, end the others."""
        start, results, deadline = time.monotonic(), {}, None
        stop_at = start + timeout if timeout else float("inf")
        while any(key != "switch" for key, _ in self.children.values()):
            now = time.monotonic()
            if now > stop_at or (deadline and now > deadline):
                for key, child in list(self.children.values()):
                    if key != "switch":
                        end(child, signal.SIGKILL if deadline and now > deadline + 2 else signal.SIGTERM)
                stop_at, deadline = float("inf"), now + 1
            for pid, (key, child) in list(self.children.items()):
                done, status, usage = os.wait4(pid, os.WNOHANG)
                if not done:
                    continue
                del self.children[pid]
                child.returncode = os.waitstatus_to_exitcode(status)
                end(child, signal.SIGKILL)  # what it left in its process group
                if key == "switch":
                    raise RuntimeError("the delay switch died")
                results[key] = {
                    "rank": key,
                    "rc": child.returncode,
                    "wall_s": round(time.monotonic() - start, 3),
                    "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
                    "max_rss_mb": usage.ru_maxrss // 1024,
                }
                if child.returncode and not keep_going and deadline is None:
                    deadline = time.monotonic() + grace
            time.sleep(0.02)
        return results

    def counters(self, rank):
        link = json.loads(sh("ip", "-n", self.ns(rank), "-s", "-j", "link", "show", "eth0"))[0]["stats64"]
        queues = [
            json.loads(sh("tc", "-n", space, "-s", "-j", "qdisc", "show", "dev", dev))
            for space, dev in ((self.ns(rank), "eth0"), (self.hub, f"p{rank}"))
        ]
        drops = sum(q.get("drops", 0) for queue in queues for q in queue)
        return {
            "tx_bytes": link["tx"]["bytes"],
            "rx_bytes": link["rx"]["bytes"],
            "tx_packets": link["tx"]["packets"],
            "rx_packets": link["rx"]["packets"],
            "drops": drops,
        }

    def close(self):
        for how in (signal.SIGTERM, signal.SIGKILL):
            for _, child in self.children.values():
                end(child, how)
            until = time.monotonic() + 2
            while self.children and time.monotonic() < until:
                for pid, (_, child) in list(self.children.items()):
                    if child.poll() is not None:
                        del self.children[pid]
                time.sleep(0.02)
        for space in [*map(self.ns, range(self.nodes)), self.hub]:
            remove(space)


def mac(rank):
    return f"02:77:00:00:{rank >> 8:02x}:{rank & 255:02x}"


def end(child, how):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, how)


def remove(space):
    """Delete a namespace of ours and whatever still runs in it (a daemon that left its session)."""
    for pid in sh("ip", "netns", "pids", space, check=False).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    sh("ip", "netns", "del", space, check=False)


def sweep():
    """Remove what an earlier netlab left behind when it was killed outright."""
    for line in sh("ip", "netns", "list").splitlines():
        found = re.match(rf"{PREFIX}(\d+)-", line)
        if found and not os.path.exists(f"/proc/{found[1]}"):
            remove(line.split()[0])


def switch(delays_ms, loss):
    """Forward Ethernet frames between the hub's ports, each one late by both its links' delays.

    With PACKET_VNET_HDR a frame travels as the kernel holds it, up to 64 KiB with its checksum
    pending, so that Python handles some hundred frames a second and not one per 1500 bytes.
    """
    SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING, SO_SNDBUFFORCE, SO_RCVBUFFORCE = 263, 15, 23, 32, 33
    HEADER = 10  # struct virtio_net_hdr
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the parent
    ports = []
    for i in range(len(delays_ms)):
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # protocol 0: deaf until bound
        port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        for side in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):  # the shaper's queue is to drop, not the socket
            port.setsockopt(socket.SOL_SOCKET, side, 64 << 20)
        port.bind((f"p{i}", 3))  # ETH_P_ALL
        port.setblocking(False)
        ports.append(port)
    index = {port: i for i, port in enumerate(ports)}
    owner = {bytes.fromhex(mac(i).replace(":", "")): i for i in range(len(ports))}
    waiting: list[Any] = []
    order = itertools.count()
    print("ready", flush=True)
    while True:
        late = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable = select.select(ports, [], [], late)[0]
        now = time.monotonic()
        for port in readable:
            source = index[port]
            for _ in range(64):
                try:
                    frame = port.recv(1 << 17)
                except BlockingIOError:
                    break
                if loss and random.random() < loss:
                    continue
                target = owner.get(frame[HEADER : HEADER + 6])
                for to in range(len(ports)) if target is None else (target,):
                    if to != source:
                        due = now + (delays_ms[source] + delays_ms[to]) / 1e3
                        heapq.heappush(waiting, (due, next(order), to, frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, to, frame = heapq.heappop(waiting)
            with contextlib.suppress(BlockingIOError, OSError):  # a full queue drops, as a router does
                ports[to].send(frame)


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--nodes", type=int, default=2)
    cli.add_argument("--rate", help="both directions, e.g. 100mbit; a comma list goes round the nodes")
    cli.add_argument("--up", help="upload only (default: --rate)")
    cli.add_argument("--down", help="download only (default: --rate)")
    cli.add_argument("--delay-ms", default="0", help="one-way delay of a link; a to b takes both links' delays")
    cli.add_argument("--loss", type=float, default=0.0, help="share of frames lost in the hub (a frame may be 64 KiB)")
    cli.add_argument("--queue-ms", type=float, default=100.0, help="what a link's queue holds, as time")
    cli.add_argument("--congestion", default="cubic")
    cli.add_argument("--mtu", type=int, default=1500)
    cli.add_argument("--timeout", type=float)
    cli.add_argument("--keep-going", action="store_true", help="let the others run on when one fails")
    cli.add_argument("--logdir")
    cli.add_argument("--switch", action="store_true", help=argparse.SUPPRESS)
    cli.add_argument("command", nargs=argparse.REMAINDER)
    args = cli.parse_args()
    if args.switch:
        return switch([float(d) for d in args.delay_ms.split(",")], args.loss)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        cli.error("no command given")

    def interrupted(number, _frame):
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    logdir = args.logdir or tempfile.mkdtemp(prefix="netlab-")
    with Lab(
        args.nodes, args.rate, args.up, args.down, args.delay_ms, args.loss, args.queue_ms, args.congestion, args.mtu
    ) as lab:
        results = lab.run(command, logdir, args.timeout, args.keep_going)
    report = json.dumps({"nodes": args.nodes, "rate": args.rate, "delay_ms": args.delay_ms, "ranks": results}, indent=1)
    with open(os.path.join(logdir, "summary.json"), "w") as out:
        out.write(report + "\n")
    print(report)
    return 1 if any(r["rc"] for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
