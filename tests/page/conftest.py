"""A real Chromium: Debian's, headless, driven by playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from playwright.async_api import Browser, BrowserContext, Page, async_playwright

from tests.servers import Server
from tests.web import Web, web

CHROMIUM = shutil.which("chromium")
QUIET = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """Skips where there is no chromium, but not where CI has to have one."""
    if CHROMIUM is None:
        if os.environ.get("CI"):
            pytest.fail("chromium is missing: apt-get install chromium")
        pytest.skip("no chromium on PATH: apt-get install chromium")
    async with async_playwright() as driver:
        launched = await driver.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield launched
        await launched.close()


@pytest.fixture
async def context(browser: Browser) -> AsyncIterator[BrowserContext]:
    """A window; whatever a page logs as an error, or throws, fails the test."""
    opened = await browser.new_context(viewport={"width": 1280, "height": 800})
    wrong: list[str] = []
    opened.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    opened.on("weberror", lambda thrown: wrong.append(str(thrown.error)))
    yield opened
    await opened.close()
    # A refused request is an answer, and shown by the page.
    assert [text for text in wrong if "Failed to load resource" not in text] == []


@pytest.fixture
async def page(context: BrowserContext) -> Page:
    opened = await context.new_page()
    opened.set_default_timeout(20_000)
    return opened


@pytest.fixture
async def served(embedded: Server, prefix: str) -> AsyncIterator[Web]:
    """A daemon with HTTP."""
    async with web(embedded.url, prefix) as it:
        yield it


@pytest.fixture
def shot() -> Callable[[Page, str], object]:
    """Takes a picture for the docs, when GUARDD_SCREENSHOTS is set."""

    async def take(page: Page, name: str) -> None:
        if os.environ.get("GUARDD_SCREENSHOTS"):
            IMAGES.mkdir(exist_ok=True)
            await page.screenshot(path=IMAGES / f"{name}.png")

    return take
