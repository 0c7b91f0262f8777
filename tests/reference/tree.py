"""Runs of one tree, and the time that passes for them (SPEC 1, 2.4, 2.8)."""

from __future__ import annotations

from collections import Counter
from typing import Any


class Tree:
    """All runs below one root, with what they share."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.runs: dict[str, Run] = {}
        self.calls: dict[str, dict[str, Any]] = {}
        self.ops: dict[str, dict[str, Any]] = {}
        self.path: list[tuple[str, str]] = []
        self.handoffs = 0
        self.window: list[tuple[str, bool]] = []
        self.last_ms: int | None = None

    def tick(self, now: int) -> None:
        """Adds the time since the last operation to every run that neither is held nor has a held ancestor."""
        passed = now - self.last_ms if self.last_ms is not None else 0
        self.last_ms = now
        for path, run in self.runs.items():
            chain = [each for name, each in self.runs.items() if path == name or path.startswith(name + "/")]
            if not any(each.reason or each.is_waiting or "all" in each.freeze for each in chain):
                run.elapsed += passed


class Run:
    """One run."""

    def __init__(self, path: str, tree: Tree, limits: dict[str, Any], now: int) -> None:
        self.path, self.tree, self.limits = path, tree, limits
        self.reason = self.ended_by = ""
        self.is_waiting = False
        self.freeze: set[str] = set()
        self.steps = self.version = self.elapsed = self.rounds = self.round_number = 0
        self.reports = False
        self.used: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.window: list[tuple[str, bool]] = []
        self.agent_windows: dict[str, list[tuple[str, bool]]] = {}
        self.empties: Counter[str] = Counter()
        self.targets: Counter[str] = Counter()
        self.replays: Counter[Any] = Counter()
        self.streaks: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        self.retries: Counter[str] = Counter()
        self.retry_at: dict[str, int] = {}
        self.last: dict[str, str] = {}
        self.in_flight: Counter[str] = Counter()
        self.seen: dict[str, Any] = {}
        if tree.last_ms is None:
            tree.last_ms = now

    @property
    def status(self) -> str:
        """running, waiting or ended."""
        return "ended" if self.reason else "waiting" if self.is_waiting else "running"

    def clear(self) -> None:
        """What progress and a clearing resume forget (SPEC 2.4)."""
        self.window, self.agent_windows = [], {}
        self.empties, self.targets, self.replays = Counter(), Counter(), Counter()
        self.rounds = 0
        self.round_number += 1
        self.tree.window = []
        self.tree.path = self.tree.path[-1:]
