"""Round trips by ICMP, as `ping` has them: `python pinger.py HOST SECONDS INTERVAL`, as root. A line a packet: ms, or `lost`.

What comes back has the kernel's time of arrival, so that a busy machine adds little.
"""

import os
import socket
import struct
import sys
import time

SO_TIMESTAMPNS = 35
LATE_S = 2.0  # what has not come back by then is lost
ECHO, REPLY = 8, 0


def checksum(packet: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(packet) // 2}H", packet))
    total = (total & 0xFFFF) + (total >> 16)
    return ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF


def main() -> None:
    host, seconds, interval = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    own = os.getpid() & 0xFFFF
    sent: list[float] = []
    back: dict[int, float] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as icmp:
        icmp.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        began = time.monotonic()
        while (now := time.monotonic()) < began + seconds + LATE_S:
            due = began + len(sent) * interval
            if len(sent) * interval < seconds and now >= due:
                head = struct.pack("!BBHHH", ECHO, 0, 0, own, len(sent)) + bytes(56)
                packet = struct.pack("!BBHHH", ECHO, 0, checksum(head), own, len(sent)) + bytes(56)
                sent.append(time.time())
                icmp.sendto(packet, (host, 0))
                continue
            icmp.settimeout(max(0.001, min(due - now, 0.5)) if len(sent) * interval < seconds else 0.5)
            try:
                data, more, _, _ = icmp.recvmsg(2048, 128)
            except TimeoutError:
                continue
            kind, _, _, ident, number = struct.unpack_from("!BBHHH", data, 4 * (data[0] & 15))
            if kind == REPLY and ident == own and number < len(sent):
                whole, nano = struct.unpack_from("=qq", more[0][2]) if more else (0, 0)
                back.setdefault(number, (whole + nano / 1e9 if more else time.time()) - sent[number])
    for number in range(len(sent)):
        print(f"{1000 * back[number]:.2f}" if number in back else "lost")


if __name__ == "__main__":
    main()
