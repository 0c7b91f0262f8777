"""The operator's page in a real browser: a loop is seen, marked and stopped; doubts are settled; nothing an agent wrote runs."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
import redis
from axe_playwright_python.async_playwright import Axe
from guardd_client import AsyncGuard
from playwright.async_api import Page, expect

from tests.page.conftest import BrowserContext
from tests.web import Web, web

EVIL = "<img src=x onerror=alert(1)>"
FREE = {"max_no_progress": None, "max_same_call": None}


async def loop(guard: AsyncGuard, name: str = "ticket-42") -> None:
    """Two agents in a circle, A B A B, after honest work, until the guard ends the run."""
    run = guard.run(name, limits={"max_denied": 1}, labels={"team": "support"})
    for number, (agent, tool) in enumerate((("planner", "draft"), ("critic", "review")) * 4):
        args = {"file": "plan.md"} if number > 1 else {"file": "notes.md"}
        answer = await run.before(tool, args, agent=agent)
        if answer.action != "execute":
            break
        await run.after(answer["call"], "progress", value={"ok": True}, usage={"tokens": 900, "model_calls": 1})
    assert answer.action == "stop"


async def doubt(guard: AsyncGuard, name: str = "refund-7") -> None:
    """An effect whose outcome nobody knows, one that happened, and its replay."""
    run = guard.run(name, agent="support", labels={"team": "pay"}, limits=FREE)
    answer = await run.before("refund", {"order": 17}, idempotency_key="order-17")
    await run.after(answer["call"], "retryable")
    answer = await run.before("refund", {"order": 18}, idempotency_key="order-18")
    await run.after(answer["call"], "progress", value={"id": 5}, operation_id="tx-5")
    assert (await run.before("refund", {"order": 18}, idempotency_key="order-18")).action == "replay"
    await guard.run(f"{name}/lookup", agent="helper").before("search", {"q": "order 17"})


async def give_token(page: Page, token: str) -> None:
    await page.get_by_role("button", name="Token", exact=True).click()
    await page.get_by_label("Token (empty: forget it)").fill(token)
    await page.get_by_role("button", name="Use it").click()
    await expect(page.get_by_role("status").filter(has_text="The token is used")).to_be_visible()


async def test_a_loop_appears_live_and_its_block_is_marked(served: Web, page: Page, shot: Any) -> None:
    """The page is open before the run begins."""
    await page.goto(served.base)
    await expect(page.get_by_text("No run yet")).to_be_visible()
    await expect(page.locator("#live")).to_have_text("live")
    async with AsyncGuard(served.daemon.url) as guard:
        await doubt(guard)
        await loop(guard)
        await guard.run("nightly-3", agent="crawler").before("crawl", {"page": 1})
    row = page.get_by_role("row").filter(has_text="ticket-42")
    await expect(row).to_contain_text("ended")
    await expect(row).to_contain_text("short_cycle")
    await expect(page.locator("#doubt-count")).to_have_text("1")
    await expect(page.get_by_role("row").filter(has_text="nightly-3")).to_be_visible()
    await expect(row).to_contain_text("5 of 60")
    await expect(page.get_by_role("row").filter(has_text="refund-7")).to_contain_text("? 1")
    await shot(page, "runs")
    await page.get_by_role("link", name="ticket-42").click()
    await expect(page.get_by_role("heading", name="ticket-42")).to_be_visible()
    marked = page.locator("tr.evidence")
    await expect(marked).to_have_count(4)
    assert [await marked.nth(each).locator("strong").inner_text() for each in range(4)] == ["draft", "review"] * 2
    assert [await marked.nth(each).locator(".mark").inner_text() for each in range(4)] == ["repeated block"] * 3 + ["fired here"]  # fmt: skip
    await expect(page.get_by_text("Rule short_cycle: observed 2")).to_be_visible()
    await expect(page.get_by_role("meter", name="Steps 5 of 60")).to_be_visible()
    assert not {"false", "null", "undefined"} & set(re.findall(r"\w+", await page.locator("main").inner_text()))
    await page.emulate_media(color_scheme="dark")
    await shot(page, "run")


async def test_filters_narrow_the_list(served: Web, page: Page) -> None:
    async with AsyncGuard(served.daemon.url) as guard:
        await doubt(guard)
        await loop(guard)
    await page.goto(served.base)
    rows = page.locator("tbody tr")
    await expect(rows).to_have_count(2)
    await page.get_by_label("Reason").select_option("short_cycle")
    await expect(rows).to_have_count(1)
    await page.get_by_label("Reason").select_option("")
    await page.get_by_label("State").select_option("running")
    await expect(rows).to_contain_text(["refund-7"])
    await page.get_by_label("State").select_option("")
    await page.get_by_label("Label, as team=pay").fill("team=support")
    await expect(rows).to_contain_text(["ticket-42"])
    await page.get_by_label("Label, as team=pay").fill("")
    await page.get_by_label("Text in the name").fill("nothing of this name")
    await expect(page.get_by_text("No run fits these filters.")).to_be_visible()


async def test_the_kill_button_ends_a_run_and_its_sub_runs(served: Web, page: Page, shot: Any) -> None:
    """A token is asked for where one is needed; then the workers' next calls are refused."""
    token = await served.token("operator")
    async with AsyncGuard(served.daemon.url) as guard:
        run, below = guard.run("task", agent="a", limits=FREE), guard.run("task/sub", agent="b")
        for each in (run, below):
            assert (await each.before("look", {"n": 1})).action == "execute"
        await page.goto(f"{served.base}/#/runs/task")
        await page.get_by_role("button", name="Kill", exact=True).click()
        dialog = page.get_by_role("dialog")
        await expect(dialog).to_contain_text("It and its sub-runs end now: task/sub.")
        await dialog.get_by_label("Why (goes into the audit)").fill("it sends mails")
        await shot(page, "kill")
        await dialog.get_by_role("button", name="Kill task").click()
        await expect(dialog.get_by_role("alert")).to_contain_text("kill needs the role operator")
        await dialog.get_by_role("button", name="Cancel").click()
        assert (await run.before("look", {"n": 2})).action == "execute", "a refused kill has killed"
        await give_token(page, token)
        await page.get_by_role("button", name="Kill", exact=True).click()
        await dialog.get_by_label("Why (goes into the audit)").fill("it sends mails")
        await dialog.get_by_role("button", name="Kill task").click()
        await expect(dialog).to_be_hidden()
        for each in (run, below):
            answer = await each.before("look", {"n": 3})
            assert (answer.action, answer.reason) == ("stop", "incident_stop")
        await expect(page.get_by_text("(by kill)")).to_be_visible()
        await expect(page.get_by_role("button", name="Kill", exact=True)).to_be_disabled()
        (entry, *_) = await guard.call("audit", {"limit": 1})
        assert "it sends mails" in str(entry)


async def test_by_keyboard_alone(served: Web, page: Page) -> None:
    """From the list to the confirmation and back; Escape changes nothing."""
    token = await served.token("operator")
    async with AsyncGuard(served.daemon.url) as guard:
        run = guard.run("keys", agent="a", limits=FREE)
        await run.before("look", {"n": 1})
        await page.goto(served.base)
        await give_token(page, token)
        await page.get_by_role("link", name="keys").focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", name="keys")).to_be_visible()
        await page.get_by_role("button", name="Freeze", exact=True).focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_label("Why (goes into the audit)")).to_be_focused()
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)
        assert (await run.before("look", {"n": 2})).action == "execute"
        await page.get_by_role("button", name="Freeze", exact=True).focus()
        await page.keyboard.press("Enter")
        await page.keyboard.type("a look")
        await page.keyboard.press("Enter")
        await expect(page.get_by_text("Held by an operator: all.")).to_be_visible()
        assert (await run.before("look", {"n": 3})).reason == "frozen"
        await page.get_by_role("button", name="Resume", exact=True).focus()
        await page.keyboard.press("Enter")
        await page.keyboard.type("looked")
        await page.keyboard.press("Enter")
        await expect(page.locator("h1")).to_contain_text("running")
        assert (await run.before("look", {"n": 4})).action == "execute"


async def test_an_effect_in_doubt_is_settled(served: Web, page: Page) -> None:
    token = await served.token("operator")
    async with AsyncGuard(served.daemon.url) as guard:
        await doubt(guard)
        await page.goto(f"{served.base}/#/doubt")
        await give_token(page, token)
        await page.get_by_role("button", name="Settle order-17").click()
        dialog = page.get_by_role("dialog")
        await dialog.get_by_label("Why (goes into the audit)").fill("found it in the bank's list")
        await dialog.get_by_role("button", name="Settle it").click()
        await expect(dialog.get_by_role("alert")).to_contain_text("say whether it happened or not")
        await dialog.get_by_label("In the outside system it").select_option("committed")
        await dialog.get_by_label("Its name there").fill("tx-17")
        await dialog.get_by_role("button", name="Settle it").click()
        await expect(page.get_by_text("Nothing is in doubt.")).to_be_visible()
        answer = await guard.run("refund-7", agent="support").before(
            "refund", {"order": 17}, idempotency_key="order-17"
        )
        assert (answer.action, answer["operation_id"]) == ("replay", "tx-17")


async def test_a_tool_is_forbidden_and_allowed_again(served: Web, page: Page) -> None:
    token = await served.token("operator")
    async with AsyncGuard(served.daemon.url) as guard:
        run = guard.run("r", agent="a", limits=FREE)
        await page.goto(f"{served.base}/#/deny")
        await expect(page.get_by_text("No tool is forbidden.")).to_be_visible()
        await give_token(page, token)
        await page.get_by_role("button", name="Forbid a tool").click()
        await page.get_by_label("Name of the rule, such as inc-1").fill("inc-1")
        await page.get_by_label("Tool, or a pattern such as payments.*").fill("pay*")
        await page.get_by_label("Why (goes into the audit)").fill("double refunds")
        await page.get_by_role("button", name="Forbid it").click()
        await expect(page.get_by_role("row").filter(has_text="inc-1")).to_contain_text("pay*")
        await expect(page.get_by_role("row").filter(has_text="inc-1")).to_contain_text("double refunds")
        assert (await run.before("pay", {"n": 1})).reason == "policy_blocked"
        await page.get_by_role("button", name="Remove inc-1").click()
        await page.get_by_label("Why (goes into the audit)").fill("mended")
        await page.get_by_role("button", name="Remove it").click()
        await expect(page.get_by_text("No tool is forbidden.")).to_be_visible()
        assert (await run.before("pay", {"n": 2})).action == "execute"
        entries = await guard.call("audit", {"limit": 10})
        assert {"double refunds", "mended"} == {word for word in ("double refunds", "mended") if word in str(entries)}


async def test_nothing_an_agent_wrote_runs(served: Web, page: Page) -> None:
    """Names, arguments, labels: shown as text."""
    dialogs: list[str] = []
    page.on("dialog", lambda shown: dialogs.append(shown.message))
    async with AsyncGuard(served.daemon.url) as guard:
        run = guard.run("evil", agent=EVIL, limits={**FREE, "max_denied": 1}, labels={"team": "x"})
        for _ in range(6):
            answer = await run.before("look", {"q": EVIL, "url": "javascript:alert(1)"}, agent=EVIL)
            if answer.action == "stop":
                break
            await run.after(answer["call"], "progress", value=EVIL)
    await page.goto(served.base)
    await page.get_by_role("link", name="evil").click()
    await expect(page.get_by_role("columnheader", name=EVIL)).to_be_visible()
    await expect(page.locator("code.args").first).to_contain_text(EVIL)
    assert await page.locator("main img").count() == 0
    assert dialogs == []


async def test_a_token_is_demanded_where_nobody_is_let_in_without(embedded: Any, prefix: str, page: Page) -> None:
    options = ("--auth", "tokens", "--operator-socket", "unix:FOLDER/o.sock")
    async with web(embedded.url, prefix, *options, ready="unix:FOLDER/o.sock") as served:
        token = await served.token("reader", f"unix:{served.daemon.folder / 'o.sock'}")
        await page.goto(served.base)
        await expect(page.locator("#banners")).to_contain_text("not_allowed")
        await expect(page.locator("#live")).to_have_text("not connected")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        await asyncio.sleep(5)
        assert asked == [], "who is not let in asks again and again"
        await give_token(page, token)
        await expect(page.get_by_text("No run yet")).to_be_visible()
        await expect(page.locator("#live")).to_have_text("live")
        assert await page.evaluate("JSON.stringify(localStorage) + document.cookie") == "{}"


async def test_a_daemon_that_stops_is_seen(served: Web, page: Page) -> None:
    await page.goto(served.base)
    await expect(page.locator("#live")).to_have_text("live")
    await served.daemon.stop()
    await expect(page.locator("#live")).to_have_text("not connected")
    await expect(page.locator("#banners")).to_contain_text("the daemon does not answer; is it running?")


async def test_a_store_that_is_not_trusted_is_said(served: Web, page: Page) -> None:
    await page.goto(served.base)
    await expect(page.locator("#live")).to_have_text("live")
    async with AsyncGuard(served.daemon.url) as guard:
        await guard.run("r", agent="a").before("look", {})
    client = redis.Redis(unix_socket_path=served.daemon.store.removeprefix("unix://"))
    client.delete(f"{served.daemon.prefix}:canary")
    client.close()
    await expect(page.locator("#banners")).to_contain_text("Nothing is granted")
    await expect(page.locator("#banners")).to_contain_text("guardd doctor --confirm")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page_is_usable_by_everybody(served: Web, context: BrowserContext, page: Page, scheme: Any) -> None:
    """No violation of WCAG that axe finds, in any view, in both colour schemes, wide and narrow."""
    async with AsyncGuard(served.daemon.url) as guard:
        await doubt(guard)
        await loop(guard)
        await guard.call("deny_rule", {"id": "inc-1", "tool": "pay*"})
    await page.emulate_media(color_scheme=scheme)
    found: list[str] = []
    for width in (1280, 380):
        await page.set_viewport_size({"width": width, "height": 800})
        for view, seen in (
            ("runs", "ticket-42"), ("runs/ticket-42", "fired here"), ("runs/refund-7", "order-17"), ("doubt", "order-17"),
            ("deny", "inc-1"),
        ):  # fmt: skip
            await page.goto(f"{served.base}/#/{view}")
            await expect(page.locator("main").get_by_text(seen).first).to_be_visible()
            results = (await Axe().run(page)).response
            found += [
                f"{view} {width} {each['id']}: {each['nodes'][0]['html'][:200]}" for each in results["violations"]
            ]
    await page.goto(f"{served.base}/#/runs/refund-7")
    await page.get_by_role("button", name="Kill", exact=True).click()
    results = (await Axe().run(page)).response
    found += [f"dialog {each['id']}: {each['nodes'][0]['html'][:200]}" for each in results["violations"]]
    assert found == []


async def test_files_of_the_page_and_no_others(served: Web) -> None:
    """Types, headers; nothing outside the folder; HEAD and other methods as for every path."""
    answer = await served.http.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    answer = await served.http.get("/page/app.js")
    assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
    for path in ("/page/nothing.js", "/page/", "/page/../page.py", "/page/%2e%2e/page.py"):
        assert (await served.http.get(path)).status_code == 404, path
    answer = await served.http.get("/", headers={"Host": "evil.example"})
    assert answer.status_code == 403


async def test_many_runs_do_not_stall_the_page(served: Web, page: Page) -> None:
    """Two hundred runs; the newest is there, and filters still work."""
    async with AsyncGuard(served.daemon.url) as guard:
        await asyncio.gather(*(guard.run(f"bulk-{n}", agent="a").before("look", {"n": n}) for n in range(220)))
    await page.goto(served.base)
    await expect(page.locator("tbody tr")).to_have_count(200)
    await page.get_by_label("Text in the name").fill("bulk-219")
    await expect(page.locator("tbody tr")).to_have_count(1)


async def focused(page: Page) -> str:
    """What has the focus, as its text."""
    return str(await page.evaluate("document.activeElement.textContent"))


async def tab_to(page: Page, text: str) -> None:
    """Presses Tab until the focus is on what has this text."""
    for _ in range(60):
        await page.keyboard.press("Tab")
        if await focused(page) == text:
            return
    raise AssertionError(f"Tab does not reach {text}")


async def test_the_focus_stays_where_it_is_when_the_list_is_drawn_anew(served: Web, page: Page) -> None:
    async with AsyncGuard(served.daemon.url) as guard:
        await guard.run("first", agent="a", limits=FREE).before("look", {"n": 1})
        await page.goto(served.base)
        await expect(page.get_by_role("link", name="first")).to_be_visible()
        await tab_to(page, "first")
        await guard.run("second", agent="a", limits=FREE).before("look", {"n": 1})
        await expect(page.get_by_role("link", name="second")).to_be_visible()
        assert await focused(page) == "first"


async def test_a_kill_needs_no_mouse(served: Web, page: Page) -> None:
    """Only keys, from the address to the end of the run; the focus is never lost."""
    token = await served.token("operator")
    async with AsyncGuard(served.daemon.url) as guard:
        run = guard.run("stop-me", agent="a", limits=FREE)
        await run.before("look", {"n": 1})
        await page.goto(served.base)
        await expect(page.get_by_role("link", name="stop-me")).to_be_visible()
        await tab_to(page, "Token")
        await page.keyboard.press("Enter")
        await page.keyboard.type(token)
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("dialog")).to_have_count(0)
        assert await focused(page) == "Token"
        await tab_to(page, "stop-me")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", name="stop-me")).to_be_visible()
        await tab_to(page, "Kill")
        await page.keyboard.press("Enter")
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)
        assert await focused(page) == "Kill"
        await page.keyboard.press("Enter")
        await run.before("look", {"n": 2})  # the button is drawn anew behind the dialog
        await expect(page.get_by_role("meter", name="Steps 2 of 60")).to_have_count(1)
        await page.keyboard.type("it runs away")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("dialog")).to_have_count(0)
        assert (await run.before("look", {"n": 3})).action == "stop"
        assert await page.evaluate("document.activeElement !== document.body")


async def test_observe_mode_is_said(served: Web, page: Page) -> None:
    async with AsyncGuard(served.daemon.url) as guard:
        await guard.run("watched", agent="a", limits={"mode": "observe"}).before("look", {"n": 1})
    await page.goto(served.base)
    await expect(page.get_by_text("Observe mode in 1 of 1 runs")).to_be_visible()
    await page.get_by_role("link", name="watched").click()
    await expect(page.get_by_text("Observe mode: refusals are only recorded")).to_be_visible()


async def test_an_address_written_by_hand_is_answered(served: Web, page: Page) -> None:
    await page.goto(f"{served.base}/#/runs/100%")
    await expect(page.locator("#banners")).to_contain_text(re.compile("unknown_run|bad_argument|no run"))
