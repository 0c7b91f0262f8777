"""`guardd demo --page` with the page open: loops appear and are marked, and the person's kill ends the last run."""

from __future__ import annotations

import asyncio
import re
import sys

from playwright.async_api import Page, expect

from tests.page.test_page import give_token


async def test_the_demo_is_seen_and_stopped_on_the_page(page: Page) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "guardd.cli.main", "demo", "--page",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdin is not None and process.stdout is not None

        async def line(pattern: str) -> str:
            """The first group of the next line that fits."""
            async with asyncio.timeout(90):
                while True:
                    said = (await process.stdout.readline()).decode()  # type: ignore[union-attr]
                    assert said, f"ended before {pattern}"
                    if found := re.search(pattern, said):
                        return found[1]

        url, token = await line(r"^page +(\S+)$"), await line(r"^token +(\S+)$")
        await page.goto(url)
        await expect(page.get_by_text("No run yet")).to_be_visible()
        process.stdin.write(b"\n")
        await line(r"^(5)\. A run without an end")
        await page.get_by_role("link", name="circle", exact=True).click()
        await expect(page.locator("tr.evidence")).to_have_count(4)
        await page.goto(f"{url}#/runs/endless")
        await give_token(page, token)
        await page.get_by_role("button", name="Kill", exact=True).click()
        await page.get_by_label("Why (goes into the audit)").fill("enough")
        await page.get_by_role("button", name="Kill endless").click()
        assert await line(r"stopped: (\w+)") == "incident_stop"
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
