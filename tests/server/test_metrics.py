"""What /metrics says, that its labels are bounded, and that dashboard and alerts name what exists (docs/metrics.md)."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from guardd_client import AsyncGuard
from prometheus_client.parser import text_string_to_metric_families

from guardd.model.answers import Answer
from guardd.server.metrics import METRICS, TOOLS_MAX, Metrics
from tests.servers import Server
from tests.web import Web, until, web

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())
ALERTS = yaml.safe_load((ROOT / "deploy/alerts.yml").read_text())
RULES: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, frozenset(labels.items())), 0.0)


@pytest.fixture
async def served(embedded: Server, prefix: str) -> AsyncIterator[Web]:
    async with web(embedded.url, prefix) as it:
        yield it


async def test_what_happens_is_counted_under_names_that_tell_nothing_of_it(served: Web) -> None:
    async with AsyncGuard(served.daemon.url) as guard:
        for number in range(5):
            call = {"run": "secret-run", "call": f"c{number}", "tool": "search", "args": {"q": "secret-arg"}}
            await guard.call("before", call)
        await guard.call("after", {"run": "secret-run", "call": "c0", "status": "progress"})
        await guard.call("open", {"run": "watched", "policy": "reference", "limits": {"max_steps": 1}})
        held = {"run": "secret-held", "call": "h", "tool": "pay", "idempotency_key": "secret-key"}
        await guard.call("before", held)
        await guard.call("after", {"run": "secret-held", "call": "h", "status": "retryable"})
        await guard.call("kill", {"run": "secret-run", "reason": "a-word-of-mine"})
        await served.ask("kill", {"run": "secret-run"})

        async def settled() -> Samples | None:
            samples = read((await served.http.get("/metrics")).text)
            is_heard = value(samples, "guardd_kill_heard_seconds_count") == 1
            return samples if is_heard and value(samples, "guardd_claims", state="in_doubt") == 1 else None

        samples = await until(settled, "the kill is heard and the doubt listed", 45)
    assert value(samples, "guardd_decisions_total", action="execute", reason="") == 4
    assert value(samples, "guardd_decisions_total", action="deny", reason="same_call_repeat") == 2
    assert value(samples, "guardd_tool_decisions_total", tool="search", action="execute") == 3
    assert value(samples, "guardd_steps_total") == 4
    assert value(samples, "guardd_results_total", status="progress") == 1
    assert value(samples, "guardd_kills_total") == 1
    assert value(samples, "guardd_runs_ended_total", reason="other", ended_by="kill") == 1
    assert value(samples, "guardd_refused_attempts_total") == 1
    assert value(samples, "guardd_errors_total", operation="kill", error="not_allowed") == 1
    assert value(samples, "guardd_decision_seconds_count") == 6
    assert value(samples, "guardd_store_seconds_count") >= 6
    assert (value(samples, "guardd_store_up"), value(samples, "guardd_store_trusted")) == (1, 1)
    assert value(samples, "guardd_connections", wire="socket") == 1
    assert value(samples, "guardd_runs_active") >= 3
    for name, labels in samples:
        assert "secret" not in f"{name} {labels}" and "word" not in str(labels)
    told = {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in samples}
    assert told <= set(METRICS), told - set(METRICS)
    assert set(METRICS) - told == {"guardd_observed_total", "guardd_hooks_total"}


async def test_ready_and_up_follow_the_store(prefix: str, tmp_path: Path) -> None:
    """The process goes on answering; what the store would have said is left out."""
    with Server.start(tmp_path) as store:
        async with web(store.url, prefix) as served:
            assert (await served.http.get("/readyz")).json() == {"ready": True}
            store.kill()
            said = await served.http.get("/readyz")
            assert (said.status_code, said.json()["error"]) == (503, "store_unavailable")
            assert said.headers["retry-after"] == "1"
            assert (await served.http.get("/healthz")).status_code == 200
            samples = read((await served.http.get("/metrics")).text)
            assert value(samples, "guardd_store_up") == 0
            assert not any(name == "guardd_claims" for name, _ in samples)


def test_tools_and_reasons_that_callers_choose_are_bounded() -> None:
    metrics = Metrics()
    for number in range(TOOLS_MAX * 3):
        metrics.answered("before", {"tool": f"tool-{number}"}, Answer(action="stop", reason=f"word-{number}"), 0.001)
        metrics.heard({"event": "ended", "run": f"r{number}", "reason": f"word-{number}", "by": "kill"}, 1.0)
        metrics.failed(f"method-{number}", "bad_argument")
        metrics.kill_asked(f"r{number}", 0.0)
    samples = read(metrics.render({}).decode())
    counted: dict[str, int] = {}
    for name, _ in samples:
        counted[name] = counted.get(name, 0) + 1
    assert counted["guardd_tool_decisions_total"] == TOOLS_MAX + 1
    assert value(samples, "guardd_tool_decisions_total", tool="other", action="stop") == TOOLS_MAX * 2
    assert (
        counted["guardd_decisions_total"] == counted["guardd_runs_ended_total"] == counted["guardd_errors_total"] == 1
    )


def test_a_refusal_that_was_only_observed_is_counted() -> None:
    metrics = Metrics()
    would = [{"action": "deny", "reason": "same_call_repeat"}]
    metrics.answered("before", {"tool": "t"}, Answer(action="execute", would=would), 0.001)
    samples = read(metrics.render({}).decode())
    assert value(samples, "guardd_observed_total", action="deny", reason="same_call_repeat") == 1


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]] + [r["expr"] for r in RULES]


def test_dashboard_and_alerts_name_metrics_and_labels_that_exist() -> None:
    named = set()
    for expression in expressions():
        for name, labels in re.findall(r"(guardd_\w+)(?:\{([^}]*)\})?", expression):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            assert base in METRICS, name
            assert (name == base) == (METRICS[base].kind != "histogram"), name
            assert set(re.findall(r"(\w+)=", labels)) <= set(METRICS[base].labels), expression
            named.add(base)
    assert named == set(METRICS), "the dashboard shows every metric"


def test_every_alert_says_what_to_do_and_no_two_panels_share_an_id() -> None:
    for rule in RULES:
        for word in ("summary", "action"):
            assert rule["annotations"][word].endswith("."), rule["alert"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
