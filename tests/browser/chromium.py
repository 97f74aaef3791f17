"""A headless Chromium, as tests and the script of the pictures drive it: over its DevTools protocol, which is JSON on a WebSocket.

`apt-get install chromium`, or CHROMIUM=/path; accessibility is asked of axe-core: `npm install --prefix tests/browser`.
"""

import asyncio
import base64
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
AXE = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"
START_S, ANSWER_S, POLL_MS = 60.0, 30.0, 20
PHONE = (390, 844)
DESKTOP = (1280, 900)


def browser_path() -> str | None:
    """Where a Chromium is; None: nowhere."""
    named = os.environ.get("CHROMIUM")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """One page in the browser. requests: addresses that were asked for. complaints: what its console and its policy said."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session: str) -> None:
        self._socket = socket
        self._session = session
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.dialogs = 0

    def hear(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case None if message.get("id") in self._answers:
                self._answers.pop(message["id"]).set_result(message)
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Log.entryAdded":
                self.complaints.append(params["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.complaints.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
            case "Page.javascriptDialogOpening":
                self.dialogs += 1

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Raises AssertionError with what the browser says against it."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params, "sessionId": self._session})
        async with asyncio.timeout(ANSWER_S):
            said = await answer
        assert "error" not in said, said["error"]
        result: dict[str, Any] = said["result"]
        return result

    async def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        said = await self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    async def until(self, condition: str, timeout_s: float = 20.0) -> None:
        """Returns when an expression is true."""
        async with asyncio.timeout(timeout_s):
            while not await self.run(f"new Promise(told => setTimeout(() => told({condition}), {POLL_MS}))"):
                pass

    async def look_like(self, size: tuple[int, int] = DESKTOP, *, is_dark: bool = False, scale: float = 1.0) -> None:
        width, height = size
        await self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.ask("Emulation.setEmulatedMedia", features=[scheme])

    async def open(self, url: str) -> None:
        await self.ask("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def press(self, key: str) -> None:
        code = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowRight": 39}[key]
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            await self.ask(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text
            )

    async def picture(self, *, is_whole: bool = True) -> bytes:
        """PNG; of the whole page, or of what is seen of it."""
        said = await self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        return base64.b64decode(said["data"])


class Browser:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(10_000_000)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tabs: dict[str, Tab] = {}

    async def hear(self) -> None:
        async for message in self._socket:
            told = message.json()
            if (session := told.get("sessionId")) in self._tabs:
                self._tabs[session].hear(told)
            elif told.get("id") in self._answers:
                self._answers.pop(told["id"]).set_result(told["result"])

    async def tab(self) -> Tab:
        target = await self._ask("Target.createTarget", url="about:blank")
        session = (await self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True))["sessionId"]
        tab = self._tabs[session] = Tab(self._socket, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            await tab.ask(f"{domain}.enable")
        return tab

    async def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(ANSWER_S):
            result: dict[str, Any] = await answer
            return result


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser of its own, with nothing in it; it ends with the block."""
    path = browser_path()
    assert path is not None, "no Chromium"
    with tempfile.TemporaryDirectory(prefix="dilocox-browser-", ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            path, "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={folder}", "--no-first-run", "--no-sandbox",
            "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--disable-background-networking",
            "--disable-component-update", "--disable-extensions", "--mute-audio", "about:blank",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(START_S):
                address = await _address(process)
            # A whole page in one picture is one message.
            async with (
                aiohttp.ClientSession() as client,
                client.ws_connect(address, max_msg_size=0, autoping=True) as socket,
            ):
                browser = Browser(socket)
                hearing = asyncio.create_task(browser.hear(), name="browser")
                drained = asyncio.create_task(_drain(process), name="browser's log")
                try:
                    yield browser
                finally:
                    for task in (hearing, drained):
                        task.cancel()
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(10):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    said = []
    while line := (await process.stderr.readline()).decode(errors="replace"):
        said.append(line)
        _, found, address = line.partition("DevTools listening on ")
        if found:
            return address.strip()
    raise AssertionError(f"the browser has ended: {''.join(said)[-500:]}")


async def _drain(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    while await process.stderr.read(65536):
        pass
