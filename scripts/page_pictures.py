"""The docs' pictures of the run's page, from a real run on this machine.

    python scripts/page_pictures.py [--rounds 64] [--stages 2] [--peers 4] [--out docs/images]

A bootstrap with `--web-port` and peers that train the tiny preset, each a real process on loopback; after so many rounds a headless
Chromium (tests/browser/chromium.py) takes page-light.png, page-dark.png and page-phone.png. Nothing is made up.
"""

import argparse
import asyncio
import io
import json
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from dilocox_peer.cli.local_swarm import LocalSwarm  # noqa: E402
from dilocox_peer.config import preset  # noqa: E402
from tests.browser.chromium import DESKTOP, PHONE, chromium  # noqa: E402

PATIENCE_S = 1800.0
COLOURS = 256
PICTURES = (("light", DESKTOP, False, 1.0), ("dark", DESKTOP, True, 1.0), ("phone", PHONE, False, 1.5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=64, help="to wait for")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--peers", type=int, default=4, help="of all stages together")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    flags = parser.parse_args()
    asyncio.run(take(flags.rounds, flags.stages, flags.peers, flags.out))


async def take(rounds: int, stages: int, peers: int, out: Path) -> None:
    """Raises ChildEnded, TimeoutError."""
    settings = {"start_peers": peers // stages, "total": 2 * rounds}
    manifest = preset("tiny", run={"name": "first-run"}, rounds=settings, stages={"count": stages})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    state = f"http://127.0.0.1:{port}/api/state"
    async with LocalSwarm(manifest, said) as swarm:
        await swarm.start_bootstrap("--web-port", str(port), "--evaluate")
        for number in range(peers):
            await swarm.start_peer(f"peer{number + 1}", stage=number % stages)
        async with asyncio.timeout(PATIENCE_S):
            while (known := await asyncio.to_thread(read, state))["now"]["round"] < rounds:
                print(
                    f"round {known['now']['round']}: {known['now']['standing']}, loss {known['now']['loss']}",
                    flush=True,
                )
                await swarm.next_change(5.0)
                await asyncio.sleep(5.0)
        async with chromium() as browser:
            for name, size, is_dark, scale in PICTURES:
                tab = await browser.tab()
                await tab.look_like(size, is_dark=is_dark, scale=scale)
                await tab.open(state.removesuffix("api/state"))
                await tab.until("document.querySelector('#curve canvas') !== null")
                path = out / f"page-{name}.png"
                with Image.open(io.BytesIO(await tab.picture())) as taken:
                    taken.convert("RGB").quantize(COLOURS).save(path, optimize=True)  # a third of the bytes
                print(path)


def said(label: str, record: dict[str, Any]) -> None:
    if record["event"] in {"Remark", "Failed"}:
        print(f"{label}: {record}", flush=True)


def read(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            known: dict[str, Any] = json.load(answer)
            return known
    except OSError:
        return {"now": {"round": -1, "standing": "not served yet", "loss": None}}


if __name__ == "__main__":
    main()
