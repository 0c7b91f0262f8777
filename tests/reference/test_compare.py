"""The comparison finds what it is there for: seeded mistakes in the rules."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.reference.compare import AsGuard, compare
from tests.reference.model import ReferenceGuard
from tests.reference.moves import TOOLS, Game, games, seeded_game, shortened
from tests.reference.state import Answer, Call, Entry, Family, Params, Run

SEEDS = range(1_500)


class KeepsWindows(ReferenceGuard):
    """Progress clears no window."""

    def clear(self, run: Run) -> None:
        window = list(run.window)
        super().clear(run)
        run.window = window


class MissesLongestPeriod(ReferenceGuard):
    """The last period is not looked for."""

    def short_cycle(self, run: Run, asked: Call) -> bool:
        longest = run.limits["max_cycle_period"]
        run.limits["max_cycle_period"] = (16 if longest is None else longest) - 1
        found = super().short_cycle(run, asked)
        run.limits["max_cycle_period"] = longest
        return found


class FreesLapsedClaims(ReferenceGuard):
    """A lease that ends frees the key."""

    def ledger_answer(self, run: Run, asked: Call, counted: Call | None) -> Answer | None:
        record = self.effects.records.get(asked.key) if asked.key else None
        if asked.key and record and self.effects.lapsed(record, self.now):
            del self.effects.records[asked.key]
        return super().ledger_answer(run, asked, counted)


class HearsLateOwners(ReferenceGuard):
    """Whoever reports settles the effect."""

    def settle_effect(self, tells: Params, asked: Call, success: bool) -> bool:
        record = self.effects.records.get(asked.key) if asked.key else None
        if record:
            record.owner = (asked.run.split("/")[0], tells["call"])
        return super().settle_effect(tells, asked, success)


class CountsStepsOnce(ReferenceGuard):
    """A step of a sub-run is none of its ancestors."""

    def admit(self, family: Family, asks: Params, asked: Call, verified: bool) -> Answer:
        answer = super().admit(family, asks, asked, verified)
        for ancestor in family.chain[1:]:
            ancestor.steps -= 1
        return answer


class ClockNeverStops(ReferenceGuard):
    """Pauses are wall time."""

    def elapsed_ms(self, run: Run) -> int:
        return self.now - run.started_ms


class KeepsStreaks(ReferenceGuard):
    """An admitted call clears no streak."""

    def admit(self, family: Family, asks: Params, asked: Call, verified: bool) -> Answer:
        assert family.own is not None
        streaks = dict(family.own.streaks)
        answer = super().admit(family, asks, asked, verified)
        family.own.streaks = streaks
        return answer


class CountsResends(ReferenceGuard):
    """The usage of a resend counts again."""

    def judge(self, asks: Params, asked: Call) -> Answer:
        asked.usage_counted = False
        return super().judge(asks, asked)


class TrustsEveryClient(ReferenceGuard):
    """A call id is enough to be told `execute` again."""

    def redelivered(self, asks: Params, asked: Call, known: Call) -> Answer:
        return known.answer if known.result_answer is None else super().redelivered(asks, asked, known)


class KeepsHandoffPath(ReferenceGuard):
    """Progress does not cut the path."""

    def clear(self, run: Run) -> None:
        root = self.root_of(run.path)
        path = list(root.handoff_path)
        super().clear(run)
        root.handoff_path = path


class SkipsRetryTimes(ReferenceGuard):
    """A verified retry may come early."""

    def too_early(self, run: Run, asked: Call) -> Answer | None:
        return None if run.last_result.get(asked.fingerprint) == "retryable" else super().too_early(run, asked)


class KeepsReservations(ReferenceGuard):
    """`after` gives no reservation back."""

    def release(self, family: Family, held: dict[str, int]) -> None:
        held.clear()


class ForgetsRefusals(ReferenceGuard):
    """Progress clears refusals."""

    def progress(self, run: Run) -> None:
        super().progress(run)
        run.refusals.clear()


class CountsSiblings(ReferenceGuard):
    """Every result is a round, siblings of a batch too."""

    def count_round(self, run: Run, asked: Call, status: str) -> None:
        run.round_tick = 0
        super().count_round(run, asked, status)


class CountsExemptCalls(ReferenceGuard):
    """cycle_exempt calls are part of the history."""

    def window_of(self, run: Run, tool: str, agent: str) -> list[Entry]:
        window = super().window_of(run, tool, agent)
        for entry in window:
            entry.exempt = False
        return window


class ResumesEverything(ReferenceGuard):
    """A kill can be resumed."""

    def final(self, run: Run) -> bool:
        return run.ended_by != "kill" and super().final(run)


class StopsOnlyTheRun(ReferenceGuard):
    """An ancestor's freeze does not hold its sub-runs."""

    def waiting(self, family: Family, scopes: set[str]) -> str | None:
        return super().waiting(Family(family.own, family.chain[:1]), scopes)


class JudgesDenialsAgain(ReferenceGuard):
    """A resend of a denied call is judged anew, and counts anew."""

    def resend(self, asks: Params, asked: Call, known: Call) -> Answer:
        if known.answer["action"] == "deny":
            known.remembered = known.streak_counted = False
        return super().resend(asks, asked, known)


class NeverReads(ReferenceGuard):
    """Derived progress confirms nothing."""

    def derive(self, run: Run, asked: Call, value: Any) -> bool:
        super().derive(run, asked, value)
        return False


class ReplaysForEver(ReferenceGuard):
    """A loop over a finished effect is not seen."""

    def ledger_answer(self, run: Run, asked: Call, counted: Call | None) -> Answer | None:
        run.replays.clear()
        return super().ledger_answer(run, asked, counted)


MISTAKES = [
    KeepsWindows,
    MissesLongestPeriod,
    FreesLapsedClaims,
    HearsLateOwners,
    CountsStepsOnce,
    ClockNeverStops,
    KeepsStreaks,
    CountsResends,
    TrustsEveryClient,
    KeepsHandoffPath,
    SkipsRetryTimes,
    KeepsReservations,
    ForgetsRefusals,
    CountsSiblings,
    CountsExemptCalls,
    ResumesEverything,
    StopsOnlyTheRun,
    JudgesDenialsAgain,
    NeverReads,
    ReplaysForEver,
]


def differences(guard: type[ReferenceGuard], game: Game) -> list[str]:
    """What `guard` answers differently from the reference in one game."""
    played = AsGuard(guard(game.limits, TOOLS, policy=game.policy))
    reference = ReferenceGuard(game.limits, TOOLS, policy=game.policy)
    return asyncio.run(compare(played, reference, game.ops))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_seeded_mistake_is_found(mistake: type[ReferenceGuard]) -> None:
    """Some game of a few hundred shows it, and what is left of that game is short."""
    shown_by = next((seed for seed in SEEDS if differences(mistake, seeded_game(seed))), None)
    assert shown_by is not None, "no game shows the mistake"
    game = shortened(seeded_game(shown_by), lambda game: bool(differences(mistake, game)))
    line = differences(mistake, game)[0]
    assert line.startswith(f"op {len(game.ops) - 1} ") and ": expected {" in line and ", actual {" in line


@given(game=games())
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_equal_guards_have_no_differences(game: Game) -> None:
    """The comparison has no noise of its own: the two sides share no state."""
    assert differences(ReferenceGuard, game) == []


def test_games_reach_every_answer() -> None:
    """Every action, reason and error of the operations is met in a few hundred games."""
    met: set[str] = set()
    for seed in range(500):
        game = seeded_game(seed)
        guard = ReferenceGuard(game.limits, TOOLS, policy=game.policy)
        for move in game.ops:
            answer = guard.call(move["op"], move, move["at_ms"])
            met.update(answer.get(name, "") for name in ("action", "reason", "error", "claim"))
    assert EXPECTED - met == set()


EXPECTED = {
    *("execute", "replay", "wait", "deny", "stop", "continue", "stale"),
    *("already_committed", "retry_too_early", "in_flight", "frozen", "human_required"),
    *("same_call_repeat", "short_cycle", "same_target_repeat", "in_doubt", "key_conflict"),
    *("permission_denied", "policy_blocked", "invalid_input", "empty_result", "invalid_result", "retry_cap"),
    *("handoff_cycle", "handoff_cap", "handoff_depth", "token_cap", "cost_cap", "model_call_cap"),
    *("no_progress", "step_cap", "wall_clock_cap", "framework_cap", "complete", "fatal", "killed"),
    *("call_conflict", "unknown_call", "unknown_operation", "unknown_run", "change_required"),
    *("effect_key_missing", "not_resumable", "limits_needed"),
}
