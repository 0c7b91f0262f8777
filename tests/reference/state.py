"""What the guard remembers, and the tree of runs (SPEC 1, 2.2 before step 1, 2.8)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from tests.reference.canonical import Misuse
from tests.reference.policy import POLICIES, Limits, Rule

Answer = dict[str, Any]
Params = dict[str, Any]

PATH = re.compile(r"[A-Za-z0-9._:-]{1,64}(/[A-Za-z0-9._:-]{1,64})*")


@dataclass
class Entry:
    """One admitted call in a window; `exempt` ones are repeats but no part of a cycle."""

    fingerprint: str
    exempt: bool


@dataclass
class Call:
    """One attempt of one client: what it asked, and what it was told."""

    client: str
    run: str
    key: tuple[str, str, str] | None
    fingerprint: str
    tool: str
    agent: str
    target: str | None
    answer: Answer = field(default_factory=dict)
    remembered: bool = True  # a deny rule's refusal is not
    admitted_tick: int | None = None
    verified_retry: bool = False
    held: dict[str, int] = field(default_factory=dict)
    result_answer: Answer | None = None
    usage_counted: bool = False
    streak_counted: bool = False
    replay_counted: bool = False


@dataclass
class Operation:
    """A charge or handoff with an op id, so that a resend counts once."""

    what: tuple[Any, ...]
    run: str
    answer: Answer = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    settle_answer: Answer | None = None
    usage_counted: bool = False
    streak_counted: bool = False


@dataclass
class Run:
    """Everything that belongs to one run or sub-run."""

    path: str
    limits: Limits
    policy: str
    started_ms: int
    opened: bool = False
    reason: str | None = None
    ended_by: str = ""
    freeze: set[str] = field(default_factory=set)
    human: bool = False
    # Times in which the clock of the run stood still: [start, end], end None while it lasts.
    pauses: list[list[int | None]] = field(default_factory=list)
    # What counts for every ancestor too.
    steps: int = 0
    used: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    # Progress (SPEC 2.4).
    version: int | None = None
    reports: bool = False
    no_progress: int = 0
    round_tick: int = 0
    derived: dict[tuple[str, str | None], list[Any]] = field(default_factory=dict)
    # Cleared by progress.
    window: list[Entry] = field(default_factory=list)
    agent_windows: dict[str, list[Entry]] = field(default_factory=dict)
    empties: dict[str, int] = field(default_factory=dict)
    targets: dict[tuple[str, str | None], int] = field(default_factory=dict)
    replays: dict[tuple[str, str, str], int] = field(default_factory=dict)
    # Cleared by a resume only.
    refusals: dict[str, str] = field(default_factory=dict)
    streaks: dict[str, int] = field(default_factory=dict)
    # Never cleared, all by fingerprint.
    last_result: dict[str, str] = field(default_factory=dict)
    in_flight: dict[str, int] = field(default_factory=dict)
    retries: dict[str, int] = field(default_factory=dict)
    retry_at_ms: dict[str, int] = field(default_factory=dict)
    # Used at the root only: they belong to the tree.
    tree_window: list[Entry] = field(default_factory=list)
    calls: dict[str, Call] = field(default_factory=dict)
    operations: dict[str, Operation] = field(default_factory=dict)
    handoffs: int = 0
    handoff_path: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Family:
    """A run and its ancestors as far as they exist, the nearest first."""

    own: Run | None
    chain: list[Run]
    blocked: bool = False  # a freeze of `subruns` kept the run from being made


class Tree:
    """The runs, and what of a run decides over its sub-runs."""

    def __init__(
        self,
        default_policy_limits: Limits,
        tools: dict[str, Rule],
        volatile: list[str] | None = None,
        policy: str = "reference",
    ) -> None:
        self.overrides = default_policy_limits
        self.tools = tools
        self.volatile = volatile
        self.policy = policy
        self.runs: dict[str, Run] = {}
        self.deny_rules: dict[str, Rule] = {}
        self.now = 0
        self.tick = 0  # numbers events, so that "admitted before the last progress" has a meaning

    def next_tick(self) -> int:
        self.tick += 1
        return self.tick

    # ---- Lineage -----------------------------------------------------------

    def lineage(self, path: str) -> list[str]:
        """`a/b/c` -> [`a/b/c`, `a/b`, `a`]."""
        if not PATH.fullmatch(path) or len(path) > 384:
            raise Misuse("bad_argument")
        parts = path.split("/")
        return ["/".join(parts[:length]) for length in range(len(parts), 0, -1)]

    def find(self, path: str) -> Family:
        """The run and its ancestors; nothing is made."""
        chain = [self.runs[name] for name in self.lineage(path) if name in self.runs]
        return Family(self.runs.get(path), chain)

    def root_of(self, path: str) -> Run:
        return self.runs[path.split("/", maxsplit=1)[0]]

    def too_deep(self, path: str) -> bool:
        """SPEC 2.2: depth is the number of `/`, the root's limit counts."""
        root = self.runs.get(path.split("/", maxsplit=1)[0])
        max_depth = root.limits["max_depth"] if root else self.root_limits(self.policy)["max_depth"]
        return max_depth is not None and path.count("/") > max_depth

    def root_limits(self, policy: str) -> Limits:
        return POLICIES[policy] | self.overrides

    def enter(self, path: str, passes_freeze: bool = False) -> Family:
        """Make the run and its missing ancestors, root first (SPEC 2.2).

        Under an ended run nothing is made. Anywhere under a run frozen with `subruns` neither,
        except by kill, finish and checkpoint, which always pass (SPEC 2.8).
        """
        parent: Run | None = None
        frozen = False
        for name in reversed(self.lineage(path)):
            run = self.runs.get(name)
            frozen = frozen or (parent is not None and "subruns" in parent.freeze)
            if run is None:
                if frozen and not passes_freeze:
                    family = self.find(path)
                    family.blocked = True
                    return family
                limits = dict(parent.limits) if parent else self.root_limits(self.policy)
                run = Run(name, limits, parent.policy if parent else self.policy, self.now)
                self.runs[name] = run
            if run.reason:
                break
            parent = run
        return self.find(path)

    # ---- Ends and pauses ---------------------------------------------------

    def end(self, run: Run, reason: str, ended_by: str) -> None:
        """The first terminal reason stays (SPEC 2.8)."""
        if run.reason is None:
            run.reason = reason
            run.ended_by = ended_by
            self.mark_pause(run)

    def terminal_reason(self, family: Family) -> str | None:
        """Step 2: the run's own reason, else that of the nearest ancestor that has one."""
        return next((run.reason for run in family.chain if run.reason), None)

    def waiting(self, family: Family, scopes: set[str]) -> str | None:
        """Step 3: `frozen` when one of `scopes` is frozen anywhere in the chain, then `human_required`."""
        if any(run.freeze & scopes for run in family.chain):
            return "frozen"
        return "human_required" if any(run.human for run in family.chain) else None

    def state(self, family: Family) -> Answer:
        """What operations that always pass are told: stop, wait or continue (SPEC 2.3)."""
        reason = self.terminal_reason(family)
        if reason:
            return {"action": "stop", "reason": reason}
        reason = self.waiting(family, {"all"})
        return {"action": "wait", "reason": reason} if reason else {"action": "continue"}

    def denied_by_rule(self, path: str, tool: str) -> bool:
        """SPEC 2.8: an emergency rule of the operator for all runs, or those at and below a prefix."""
        for rule in self.deny_rules.values():
            prefix, until_ms = rule.get("run_prefix"), rule.get("until_ms")
            below = prefix is None or path == prefix or path.startswith(prefix + "/")
            if below and (until_ms is None or self.now < until_ms) and fnmatchcase(tool, rule["tool"]):
                return True
        return False

    # ---- Wall time ---------------------------------------------------------

    def mark_pause(self, run: Run) -> None:
        """Open or close the present pause; to be called after every change of end, freeze or human wait."""
        paused = bool(run.reason) or "all" in run.freeze or run.human
        lasting = bool(run.pauses) and run.pauses[-1][1] is None
        if paused and not lasting:
            run.pauses.append([self.now, None])
        elif lasting and not paused:
            run.pauses[-1][1] = self.now

    def elapsed_ms(self, run: Run) -> int:
        """Time since the first operation in which neither the run nor an ancestor stood still (SPEC 2.8)."""
        pauses = []
        for relative in self.find(run.path).chain:
            for start, end in relative.pauses:
                assert start is not None
                pauses.append((max(start, run.started_ms), self.now if end is None else end))
        elapsed_ms, counted_until = self.now - run.started_ms, run.started_ms
        for start, end in sorted(pauses):
            elapsed_ms -= max(0, end - max(start, counted_until))
            counted_until = max(counted_until, end)
        return elapsed_ms
