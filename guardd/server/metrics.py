"""What a daemon counts, every metric declared once; /metrics, the page of docs and the dashboard's tests come from here.

No run, key or argument is in a label; names that callers choose are bounded.
Several workers count into files that they share (`PROMETHEUS_MULTIPROC_DIR`,
set by their parent), so that whichever answers a scrape tells the sum.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector

from guardd.model.answers import Answer
from guardd.model.reasons import NEXT_ACTION
from guardd.protocol.operations import OPERATIONS

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

TOOLS_MAX = 64
OTHER = "other"
KILLS_MAX = 1024
WORKER_NUMBER = "GUARDD_WORKER"
FILES = "PROMETHEUS_MULTIPROC_DIR"
KNOWN_REASONS = frozenset(reason for reasons in NEXT_ACTION for reason in reasons) | {"killed", "cancelled"}
SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. looked: read from the store at a scrape, not counted; every daemon of a store says the same."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS
    looked: bool = False


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("guardd_decisions_total", "counter", "Answers of `before`.", ("action", "reason")),
        Metric("guardd_tool_decisions_total", "counter", "Answers of `before` by tool; the first 64 names, then `other`.", ("tool", "action")),
        Metric("guardd_steps_total", "counter", "Admitted calls."),
        Metric("guardd_results_total", "counter", "Results that `after` reported and that were taken.", ("status",)),
        Metric("guardd_observed_total", "counter", "Refusals that observe mode only recorded.", ("action", "reason")),
        Metric("guardd_decision_seconds", "histogram", "A `before`, from the gate to its answer."),
        Metric("guardd_store_seconds", "histogram", "A batch of commands, to the store and back; failed ones included."),
        Metric("guardd_store_batch_commands", "histogram", "Commands in a batch.", (), SIZES),
        Metric("guardd_errors_total", "counter", "Requests that ended in an error.", ("operation", "error")),
        Metric("guardd_refused_attempts_total", "counter", "Attempts that role, prefix, token, Host or Origin refused."),
        Metric("guardd_audit_failures_total", "counter", "Entries of the audit of which a copy could not be written."),
        Metric("guardd_kills_total", "counter", "Kills that this daemon was asked for and carried out."),
        Metric("guardd_kill_heard_seconds", "histogram", "From the request of a kill to its event here, which watchers are told then."),
        Metric("guardd_runs_ended_total", "counter", "Ends of runs that were heard of; every daemon of a store hears all.", ("reason", "ended_by")),
        Metric("guardd_claims_lapsed_total", "counter", "Claims that the sweep found past their lease: in doubt since then."),
        Metric("guardd_hooks_total", "counter", "Deliveries of stop hooks: `delivered`, `failed` (given up), `dropped` (too many waited).", ("outcome",)),
        Metric("guardd_requests_in_flight", "gauge", "Requests being answered.", ("wire",)),
        Metric("guardd_connections", "gauge", "Open connections.", ("wire",)),
        Metric("guardd_event_streams", "gauge", "Listeners of /v1/events."),
        Metric("guardd_store_up", "gauge", "1: the store answered this scrape.", looked=True),
        Metric("guardd_store_trusted", "gauge", "1: nothing speaks against granting; 0: an operator has to look.", looked=True),
        Metric("guardd_claims", "gauge", "Effects by state: `claimed`, their lease runs; `in_doubt`, an operator has to look.", ("state",), looked=True),
        Metric("guardd_in_doubt_oldest_seconds", "gauge", "Age of the oldest doubt; 0: there is none.", looked=True),
        Metric("guardd_runs_active", "gauge", "Runs and sub-runs that were heard of in the last two minutes.", looked=True),
    )
}  # fmt: skip


class Metrics:
    """The counters of one daemon."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._made: dict[str, Any] = {m.name: self._make(m) for m in METRICS.values() if not m.looked}
        self._children: dict[tuple[str, ...], Any] = {}
        self._tools: set[str] = set()
        self._kills: dict[str, float] = {}
        # Each worker hears every event; one of them counts.
        self._is_first = os.environ.get(WORKER_NUMBER, "0") == "0"
        self.refresh: Callable[[], None] = lambda: None
        """Sets the gauges; asked at every scrape and every second."""
        self.decision_seconds = self._made["guardd_decision_seconds"].observe
        self._steps = self._made["guardd_steps_total"].inc
        self._store_seconds = self._made["guardd_store_seconds"].observe
        self._batch_commands = self._made["guardd_store_batch_commands"].observe
        self.refused: Callable[[], None] = self._made["guardd_refused_attempts_total"].inc
        self.audit_failed: Callable[[], None] = self._made["guardd_audit_failures_total"].inc
        self.lapsed: Callable[[int], None] = self._made["guardd_claims_lapsed_total"].inc

    def _make(self, metric: Metric) -> Any:
        if metric.kind == "counter":
            return Counter(metric.name, metric.text, metric.labels, registry=self.registry)
        if metric.kind == "gauge":
            return Gauge(metric.name, metric.text, metric.labels, registry=self.registry, multiprocess_mode="livesum")
        return Histogram(metric.name, metric.text, metric.labels, registry=self.registry, buckets=metric.buckets)

    def _child(self, name: str, *labels: str) -> Any:
        found = self._children.get((name, *labels))
        if found is None:
            found = self._children[(name, *labels)] = self._made[name].labels(*labels)
        return found

    # ---- What happened ---------------------------------------------------------

    def answered(self, method: str, params: Mapping[str, Any], answer: Any, seconds: float) -> None:
        """One request, and what it was answered with."""
        if method == "before" and isinstance(answer, Answer):
            self.decision_seconds(seconds)
            self._child("guardd_decisions_total", answer.action, _known(answer.reason)).inc()
            self._child("guardd_tool_decisions_total", self._tool(params["tool"]), answer.action).inc()
            if answer.action == "execute":
                self._steps()
            for would in answer.would:
                self._child("guardd_observed_total", would["action"], _known(would["reason"])).inc()
        elif method == "after":
            self._child("guardd_results_total", params["status"]).inc()
        elif method == "kill":
            self._made["guardd_kills_total"].inc()

    def failed(self, method: str, error: str) -> None:
        """One request that ended in an error."""
        self._child("guardd_errors_total", method if method in OPERATIONS else OTHER, error).inc()

    def kill_asked(self, run: object, began_s: float) -> None:
        """A kill is on its way; `heard` measures it."""
        if isinstance(run, str):
            if len(self._kills) >= KILLS_MAX:
                self._kills.pop(next(iter(self._kills)))
            self._kills[run] = began_s

    def heard(self, event: Mapping[str, str], now_s: float) -> None:
        """What the scripts publish."""
        if event.get("event") != "ended":
            return
        if event.get("by") == "kill" and (began_s := self._kills.pop(event.get("run", ""), None)) is not None:
            self._made["guardd_kill_heard_seconds"].observe(now_s - began_s)
        if self._is_first:
            self._child("guardd_runs_ended_total", _known(event.get("reason", "")), event.get("by", "")).inc()

    def hook(self, outcome: str) -> None:
        """A delivery of a stop hook."""
        self._child("guardd_hooks_total", outcome).inc()

    def batch(self, commands: int, seconds: float) -> None:
        """One batch went to the store."""
        self._store_seconds(seconds)
        self._batch_commands(commands)

    def set(self, name: str, value: float, *labels: str) -> None:
        """A gauge."""
        (self._child(name, *labels) if labels else self._made[name]).set(value)

    def _tool(self, tool: str) -> str:
        if tool in self._tools:
            return tool
        if len(self._tools) >= TOOLS_MAX:
            return OTHER
        self._tools.add(tool)
        return tool

    # ---- What is told ----------------------------------------------------------

    def render(self, looked: Mapping[str, Mapping[tuple[str, ...], float]]) -> bytes:
        """The text that Prometheus reads. looked: what the store said, by metric and labels."""
        self.refresh()
        if FILES in os.environ:
            told = CollectorRegistry()
            MultiProcessCollector(told)  # type: ignore[no-untyped-call]
        else:
            told = self.registry
        text: bytes = prometheus_client.generate_latest(told)
        store = CollectorRegistry()
        store.register(_Looked(looked))
        return text + prometheus_client.generate_latest(store)


class _Looked:
    """What was read for one scrape."""

    def __init__(self, looked: Mapping[str, Mapping[tuple[str, ...], float]]) -> None:
        self._looked = looked

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See prometheus_client."""
        for name, samples in self._looked.items():
            metric = METRICS[name]
            family = GaugeMetricFamily(name, metric.text, labels=metric.labels)
            for labels, value in samples.items():
                family.add_metric(labels, value)
            yield family


def _known(reason: str) -> str:
    """A kill's reason may be any word: only those of the contract are labels."""
    return reason if not reason or reason in KNOWN_REASONS or reason in _OTHER_REASONS else OTHER


_OTHER_REASONS = frozenset(
    word
    for operation in OPERATIONS.values()
    for answer in operation.answers
    for word in answer.split()[1:]
    if word != "*"
)
