"""The run's page in a real browser: painted at once, kept fresh, readable by keyboard and on a phone, and deaf to what strangers
call themselves. Skipped where there is no Chromium."""

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from dilocox_peer.events import Event
from dilocox_peer.events_of_health import Trouble
from dilocox_peer.web.document import RunPage
from dilocox_peer.web.facts import RunFacts
from dilocox_peer.web.server import PageServer
from tests.browser.chromium import AXE, DESKTOP, PHONE, Browser, Tab, browser_path, chromium
from tests.simulated_run import simulated_facts, simulated_manifest
from tests.unit.test_page import HOSTILE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser_path() is None, reason="no Chromium here: apt-get install chromium, or CHROMIUM=/path"),
]
MANIFEST = simulated_manifest(400, 2)
FACTS = simulated_facts(MANIFEST, peers=12, rounds=120)


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as opened:
        yield opened


@pytest.fixture
def served() -> Iterator[PageServer]:
    told: list[Event] = []
    with PageServer({MANIFEST.run_id: RunPage(MANIFEST)}, host="127.0.0.1", port=0, listener=told.append) as page:
        page.show(MANIFEST.run_id, fresh(FACTS))
        yield page
    assert not told


def fresh(facts: RunFacts) -> RunFacts:
    """As if the last round had ended a moment ago."""
    return replace(facts, at_s=time.time()) if facts.at_s > time.time() else facts


async def opened(browser: Browser, page: PageServer, size: tuple[int, int] = DESKTOP, *, is_dark: bool = False) -> Tab:
    tab = await browser.tab()
    await tab.look_like(size, is_dark=is_dark)
    await tab.open(page.url)
    await tab.until("document.querySelector('#curve canvas') !== null && state.now !== undefined")
    return tab


async def test_it_shows_the_run_and_what_is_new(browser: Browser, served: PageServer) -> None:
    tab = await opened(browser, served)
    assert await tab.run("document.getElementById('rounds').textContent") == "Round 120 of 400 · 30 %"
    assert await tab.run("document.querySelectorAll('#stages .stage').length") == 2
    assert await tab.run("document.querySelectorAll('#newest tr').length") == 12
    assert "dilocox-peer join dilocox://" in await tab.run("document.getElementById('join').textContent")
    one = [replace(FACTS.stages[0], holders=FACTS.stages[0].holders[:1]), replace(FACTS.stages[1], holders=())]
    troubles = [Trouble("empty", 1, stops=True), Trouble("thin", 0, (FACTS.stages[0].holders[0].peer,))]
    served.show(MANIFEST.run_id, replace(FACTS, stages=one, troubles=troubles))
    await tab.until("document.getElementById('word').textContent === 'stalled'", 5.0)
    assert await tab.run("document.querySelectorAll('#stages li').length") == 1
    assert "nobody holds stage 1" in await tab.run("document.getElementById('why').textContent")
    assert "stage 0 has one peer" in await tab.run("document.getElementById('troubles').textContent")
    assert "EMPTY" in await tab.run("document.querySelector('.stage.none').textContent")
    assert tab.complaints == []
    assert all(request.startswith(served.url) for request in tab.requests), tab.requests


@pytest.mark.parametrize(("size", "is_dark"), [(DESKTOP, False), (DESKTOP, True), (PHONE, False), (PHONE, True)])
async def test_it_fits_and_has_no_serious_fault(
    browser: Browser, served: PageServer, size: tuple[int, int], is_dark: bool
) -> None:
    if not AXE.exists():
        pytest.skip("no axe-core here: npm install --prefix tests/browser")
    tab = await opened(browser, served, size, is_dark=is_dark)
    assert await tab.run("document.documentElement.scrollWidth <= innerWidth"), "it has to be scrolled sideways"
    await tab.run(AXE.read_text() + ";0")
    found = await tab.run(
        "axe.run().then(said => said.violations.map(v => v.impact + ' ' + v.id + ': ' + v.nodes.map(n => n.html).join(' | ')))"
    )
    assert found == []


async def test_everything_is_reached_and_used_by_keyboard(browser: Browser, served: PageServer) -> None:
    tab = await opened(browser, served)
    seen = []
    for _ in range(40):
        await tab.press("Tab")
        seen.append(
            await tab.run(
                "(() => { const e = document.activeElement, s = getComputedStyle(e.matches('input') ? e.nextElementSibling : e);"
                "return [e.id || e.dataset.copies || e.value || e.className || e.tagName, s.outlineStyle]; })()"
            )
        )
        if seen[-1][0] == "curve":
            await tab.press("ArrowLeft")
            await tab.until("document.getElementById('curve-at').textContent.includes('training')")
            assert "newest" not in await tab.run("document.getElementById('curve-at').textContent")
        if seen[-1][0] == "tokens":
            await tab.press("ArrowRight")
            await tab.until("axis === 'at_s'")
    names = [name for name, _ in seen]
    assert {"curve", "join", "export", "tokens", "api"} <= set(names), names
    assert all(style != "none" for name, style in seen if name not in {"BODY", "HTML"}), seen


async def test_of_a_run_by_invitation_no_line_to_join_by_is_copied(browser: Browser) -> None:
    invited = simulated_manifest(400, 1, admission="invite")
    with PageServer({invited.run_id: RunPage(invited)}, host="127.0.0.1", port=0, listener=print) as served:
        served.show(invited.run_id, fresh(simulated_facts(invited, peers=3, rounds=12)))
        tab = await opened(browser, served)
        assert (
            await tab.run("document.getElementById('how').textContent")
            == "By invitation: ask the run’s owner for a link."
        )
        assert await tab.run("document.querySelector('[data-copies=join]').offsetParent === null")
        assert "invite --rights read" in await tab.run("document.getElementById('kept').textContent")
        assert tab.complaints == []


async def test_what_strangers_call_themselves_is_text(browser: Browser) -> None:
    named = simulated_facts(MANIFEST, peers=60, rounds=12, names=HOSTILE)
    page = RunPage(MANIFEST)
    page.name = HOSTILE[0]  # which no manifest may have
    with PageServer({MANIFEST.run_id: page}, host="127.0.0.1", port=0, listener=print) as served:
        served.show(MANIFEST.run_id, replace(named, link=HOSTILE[4]))
        tab = await opened(browser, served)
        assert (
            await tab.run("document.querySelectorAll('img, svg:not(.icon), script:not([src]), style, iframe').length")
            == 0
        )
        shown = await tab.run("[...document.querySelectorAll('.who')].map(each => each.textContent)")
        for name in HOSTILE[:8]:
            assert any(each.startswith(f"{name} …") for each in shown)
        assert await tab.run("document.getElementById('name').textContent") == HOSTILE[0]
        assert await tab.run("document.getElementById('join').textContent") == f"dilocox-peer join {HOSTILE[4]}"
        assert tab.dialogs == 0
        assert tab.complaints == []
        assert all(request.startswith(served.url) for request in tab.requests)


async def test_it_says_when_the_bootstrap_is_gone_and_goes_on_when_it_is_back(browser: Browser) -> None:
    page, run = RunPage(MANIFEST), MANIFEST.run_id
    with PageServer({run: page}, host="127.0.0.1", port=0, listener=print) as served:
        served.show(run, FACTS)
        tab = await opened(browser, served)
        port = served.port
    await tab.until("document.getElementById('live').className === 'live lost'", 30.0)
    with PageServer({run: RunPage(MANIFEST)}, host="127.0.0.1", port=port, listener=print) as served:
        served.show(run, replace(FACTS, at_s=FACTS.at_s + 1))
        await tab.until("document.getElementById('live').className === 'live'", 30.0)
