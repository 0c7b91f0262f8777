"""Each Lua include alone, against a model of about ten lines."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.lua.include_runner import include

EXACT_MAX = 2**53 - 1
FPS = st.sampled_from(["aa", "bb", "cc"])
ENTRIES = st.lists(st.tuples(FPS, st.booleans()), max_size=24)
NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
VALUES = st.from_regex(r"[A-Za-z0-9:/._-]{1,12}", fullmatch=True)

num, pack, window, progress = include("num"), include("pack"), include("window"), include("progress")
limits, ledger, marks, calls = include("limits"), include("ledger"), include("marks"), include("calls")
chain, usage, streak, clock = include("chain"), include("usage"), include("streak"), include("clock")
answer, trace, hash_ = include("answer"), include("trace"), include("hash")


# ---- num, pack, clock --------------------------------------------------------


@given(st.integers(0, EXACT_MAX))
def test_whole_numbers_keep_every_digit(n: int) -> None:
    """Lua's own tostring would write 1e+15."""
    assert num.text(n) == str(n)
    assert num.of(str(n)) == n


def test_a_sum_beyond_the_exact_range_stays_at_the_bound() -> None:
    """A counter that lost its last digits would count wrong for ever."""
    assert num.text(2**53 + 10) == str(EXACT_MAX)
    assert num.of(None) == 0


@given(st.dictionaries(NAMES, VALUES, max_size=6))
def test_a_packed_record_reads_back_as_it_was(record: dict[str, str]) -> None:
    """format and parse are inverse for values without blanks."""
    text = pack.format(record, sorted(record))
    assert dict(pack.parse(text).items()) == record


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_escaped_text_fits_into_a_record_and_comes_back(text: str) -> None:
    """Free text never breaks a packed record."""
    escaped = pack.escape(text)
    assert pack.unescape(escaped) == text
    assert not any(char in escaped for char in " =\t\n\r")
    assert dict(pack.parse(f"a={escaped} b=1").items()).get("b") == "1"


@given(st.lists(st.sampled_from(["all", "effects", "retries"])), st.sampled_from(["all", "effects", "x", "al"]))
def test_a_word_is_in_a_comma_list_only_as_a_whole(words: list[str], word: str) -> None:
    """`al` is not in `all`."""
    assert pack.lists(",".join(words), word) == (word in words)


def test_a_virtual_clock_wins_and_without_one_the_server_is_asked() -> None:
    """Time has one source per decision."""
    assert clock.now(1234) == 1234
    with pytest.raises(Exception, match="no server here: TIME"):
        clock.now(None)


# ---- window -----------------------------------------------------------------


def text_of(entries: list[tuple[str, bool]]) -> str:
    return " ".join(f"{i}{'~' if exempt else ':'}{fp}" for i, (fp, exempt) in enumerate(entries, 1))


@given(ENTRIES)
def test_a_window_reads_back_as_it_was(entries: list[tuple[str, bool]]) -> None:
    """parse and format are inverse."""
    assert window.format(window.parse(text_of(entries))) == text_of(entries)


@given(ENTRIES, FPS, st.integers(1, 30))
def test_equal_calls_are_counted_in_the_last_entries_only(entries: list[tuple[str, bool]], fp: str, span: int) -> None:
    """SPEC 2.2 step 10: exempt entries count as repeats."""
    count, _ = window.count(window.parse(text_of(entries)), fp, span)
    assert count == [each for each, _ in entries[-span:]].count(fp)


def cycle_model(entries: list[tuple[str, bool]], fp: str, period_max: int) -> int | None:
    history = [each for each, exempt in entries if not exempt] + [fp]
    for n in range(2, period_max + 1):
        block = history[-n:]
        if len(history) >= 2 * n and block == history[-2 * n : -n] and len(set(block)) > 1:
            return n
    return None


@example(entries=[("a" * 16, False)] * 3, fp="a" * 16, period_max=2)
@given(ENTRIES, FPS, st.integers(0, 16))
def test_a_cycle_is_two_equal_blocks_that_are_not_all_the_same(
    entries: list[tuple[str, bool]], fp: str, period_max: int
) -> None:
    """SPEC 2.2 step 10, for every period from 2."""
    found = window.cycle(window.parse(text_of(entries)), fp, period_max)
    period = found[0] if isinstance(found, tuple) else found
    assert period == cycle_model(entries, fp, period_max)


@given(ENTRIES, FPS, st.booleans(), st.integers(1, 12), st.integers(0, 8))
def test_what_is_kept_decides_as_the_whole_history_would(
    entries: list[tuple[str, bool]], fp: str, exempt: bool, span: int, period_max: int
) -> None:
    """Trimming never changes a later answer within the span and the longest period."""
    text = ""
    for number, (each, each_exempt) in enumerate([*entries, (fp, exempt)], 1):
        text = window.push(text, str(number), each, each_exempt, span, period_max)
    kept = window.parse(text)
    whole = [*entries, (fp, exempt)]
    for probe in ("aa", "bb", "cc"):
        assert window.count(kept, probe, span)[0] == [each for each, _ in whole[-span:]].count(probe)
        found = window.cycle(kept, probe, period_max)
        assert (found[0] if isinstance(found, tuple) else found) == cycle_model(whole, probe, period_max)
    assert len(text.split()) <= 3 * (span + 2 * period_max) + 3


# ---- progress, limits -------------------------------------------------------


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.sampled_from(["increases", "decreases"]))
def test_a_derived_value_confirms_when_it_passes_the_best_so_far(values: list[int], when: str) -> None:
    """SPEC 2.4: the first value is the baseline; flapping confirms once."""
    mark, best = None, None
    for value in values:
        confirmed, mark = progress.derive(mark, {"when": when, "value": f"1{value:03d}"})
        passes = best is not None and (value > best if when == "increases" else value < best)
        assert bool(confirmed) == passes
        best = value if best is None or passes else best


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=20), st.integers(1, 6))
def test_a_new_value_confirms_once_and_a_full_memory_confirms_nothing(values: list[str], seen_max: int) -> None:
    """SPEC 2.4: only a value that the run has never seen is new."""
    mark, seen = None, set()
    for number, value in enumerate(values):
        confirmed, mark = progress.derive(mark, {"when": "new", "value": value, "seen_max": str(seen_max)})
        is_new = number > 0 and value not in seen and len(seen) < seen_max
        assert bool(confirmed) == is_new
        if number == 0 or is_new:
            seen.add(value)


@pytest.mark.parametrize(
    ("name", "current", "value", "loosens"),
    [
        ("max_steps", "5", "6", True), ("max_steps", "5", "5", False), ("max_steps", "5", "4", False),
        ("max_steps", "5", "-", True), ("max_steps", None, "9", False), ("max_steps", None, "-", False),
        ("cycle_window", "8", "4", True), ("cycle_window", "8", "9", False), ("max_cycle_period", "8", "2", True),
        ("on_refusal", "stop", "deny", True), ("on_refusal", "deny", "stop", False), ("mode", "enforce", "observe", True),
        ("window_scope", "run", "agent", True), ("window_scope", "run", "tree", False), ("claim_lease_ms", "5", "9", False),
    ],
)  # fmt: skip
def test_what_loosens_a_limit(name: str, current: str | None, value: str, loosens: bool) -> None:
    """SPEC 2.10: a worker may only tighten; for a window, more is stricter."""
    assert limits.loosens(name, current, value) == loosens


def test_merged_limits_keep_their_order_and_a_dash_takes_one_away() -> None:
    """Text in, text out."""
    assert limits.merge("max_steps=5 max_depth=4", {"max_depth": "-", "max_steps": "6", "max_tokens": "9"}) == (
        "max_steps=6 max_tokens=9"
    )
    assert limits.tighten("max_steps=5 max_depth=4", "max_steps=9 max_depth=2") == "max_steps=5 max_depth=2"
    assert limits.first_looser("max_steps=5", {"max_steps": "6"}) == ("max_steps", "5")


# ---- ledger, marks, calls, chain, usage, streak -----------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "free"), ({"state": "freed"}, "free"), ({"state": "committed", "fp": "f"}, "committed"),
        ({"state": "committed", "fp": "other"}, "conflict"), ({"state": "committed"}, "committed"),
        ({"state": "claimed", "fp": "f", "until_ms": "101"}, "claimed"),
        ({"state": "claimed", "fp": "f", "until_ms": "100"}, "in_doubt"), ({"state": "in_doubt", "fp": "f"}, "in_doubt"),
        ({"state": "something_new", "fp": "f"}, "unknown"), ({"state": "something_new"}, "unknown"),
    ],
)  # fmt: skip
def test_what_a_record_says_to_a_caller(fields: dict[str, str], expected: str) -> None:
    """SPEC 2.6, looked at 100 ms by the call with fingerprint f."""
    says = ledger.look(fields, "f", 100)
    assert says[0] == expected
    assert says[1] == (1 if expected == "claimed" else 0)


@pytest.mark.parametrize("status", ["progress", "complete", "retryable", "fatal", "invalid_input", "human_required"])
@pytest.mark.parametrize("committed", ["", "1", "0"])
@pytest.mark.parametrize("is_success", [True, False])
def test_what_a_result_does_to_its_effect(status: str, committed: str, is_success: bool) -> None:
    """SPEC 2.6: what was said wins; unknown outcomes are in doubt, never free."""
    said = {"1": "commit", "0": "free"}.get(committed)
    by_status = {
        "progress": "commit",
        "complete": "commit",
        "invalid_input": "free",
        "human_required": "free",
    }.get(status)
    if by_status == "commit" and not is_success:
        by_status = None
    assert ledger.outcome(status, committed, is_success) == (said or by_status or "doubt")


@pytest.mark.parametrize("state", ["claimed", "in_doubt", "committed", "freed"])
@pytest.mark.parametrize("owner", ["me", "other"])
def test_only_the_owner_of_an_open_record_may_report(state: str, owner: str) -> None:
    """SPEC 2.6: a late owner's result is kept beside the record."""
    record = ledger.hash({"state": state, "owner": owner})
    status = ledger.report(record, "me", "commit", {"value": "1"}, 5)
    may = owner == "me" and state in ("claimed", "in_doubt")
    assert status == ("held" if may else "stale")
    assert record["f"]["state"] == ("committed" if may else state)
    assert record["f"]["value" if may else "late_value"] == "1"
    assert (ledger.renew(ledger.hash({"state": state, "owner": owner}), "me", 5, 10) == "renewed") == may


@given(st.integers(0, 5), st.integers(0, 3), st.integers(0, 3))
def test_a_mark_of_an_older_progress_is_void(count: int, number: int, current: int) -> None:
    """SPEC 3: progress clears in O(1)."""
    memory = marks.hash({})
    marks.set_count(memory, "t:x", count, number)
    assert marks.count(memory, "t:x", current) == (count if number == current else 0)


def test_a_refusal_is_void_after_a_resume_but_retries_stay() -> None:
    """SPEC 2.8: a named change forgets remembered refusals."""
    memory = marks.hash({"f:x": "retries=2 refused=invalid_input at=1"})
    assert marks.call(memory, "x", 1)["refused"] == "invalid_input"
    assert marks.call(memory, "x", 2)["refused"] is None
    assert marks.call(memory, "x", 2)["retries"] == "2"


def test_a_call_record_reads_back_as_it_was() -> None:
    """Absent members stay absent."""
    ids = calls.hash({})
    calls.set(ids, "c:1", {"state": "open", "run": "r1/a", "tool": "a%20b"})
    assert dict(calls.get(ids, "c:1").items()) == {"state": "open", "run": "r1/a", "tool": "a%20b"}
    assert calls.get(ids, "c:2") is None


def chain_of(of: Any, *runs: dict[str, str]) -> Any:
    made = [{"path": "/".join("r" * (i + 1)), "f": f, "changed": {}, "dropped": {}, "elapsed_ms": int(f.get("elapsed", 0))}
            for i, f in enumerate(runs)]  # fmt: skip
    return of.to_lua({"runs": made, "now": 100, "parsed": {}, "events": {}, "root": made[0], "own": made[-1]})


def test_the_own_reason_comes_before_the_nearest_ancestors() -> None:
    """SPEC 2.2 step 2."""
    ended = {"status": "ended", "reason": "a"}
    assert chain.ended(chain_of(chain, {"status": "running"}, {"status": "running"})) is None
    assert chain.ended(chain_of(chain, ended, {"status": "ended", "reason": "b"})) == "b"
    assert chain.ended(chain_of(chain, ended, {"status": "ended", "reason": "b"}, {"status": "running"})) == "b"


def test_frozen_comes_before_waiting_for_a_human_and_only_in_scope() -> None:
    """SPEC 2.2 step 3."""
    both = chain_of(chain, {"status": "waiting"}, {"status": "running", "freeze": "effects"})
    assert chain.paused(both, ["all", "effects"]) == "frozen"
    assert chain.paused(both, ["all"]) == "human_required"
    assert chain.paused(chain_of(chain, {"status": "running", "freeze": "effects"}), ["all"]) is None


def test_the_first_reason_of_a_run_stays() -> None:
    """SPEC 2.8."""
    c = chain_of(chain, {"status": "running"})
    chain.finish(c, c["own"], "step_cap", "cap", {"limit": "5"})
    chain.finish(c, c["own"], "killed", "kill", {})
    assert (c["own"]["f"]["reason"], c["own"]["f"]["ended_by"], c["own"]["f"]["stop_limit"]) == (
        "step_cap",
        "cap",
        "5",
    )


@pytest.mark.parametrize(
    ("root", "own", "reason"),
    [
        ({"steps": "5", "limits": "max_steps=5"}, {"steps": "1", "limits": "max_steps=5"}, "step_cap"),
        ({"limits": "max_wall_ms=10", "elapsed": "10"}, {"limits": ""}, "wall_clock_cap"),
        ({"tokens": "5", "limits": "max_tokens=5"}, {"limits": ""}, None),
        ({"tokens": "6", "limits": "max_tokens=5"}, {"limits": ""}, "token_cap"),
        ({"limits": "max_cost_micros=0"}, {"limits": ""}, "cost_cap"),
        ({"limits": "max_cost_micros=0"}, {"limits": "max_model_calls=0"}, "model_call_cap"),
    ],
)
def test_caps_of_the_run_and_then_of_its_ancestors(
    root: dict[str, str], own: dict[str, str], reason: str | None
) -> None:
    """SPEC 2.2 step 4: used above the cap, or a cap of 0."""
    c = chain_of(usage, {"status": "running", **root}, {"status": "running", **own})
    found = usage.capped(c, True)
    assert (found[1] if isinstance(found, tuple) else None) == reason


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_a_reservation_fits_beside_used_and_held(used: int, held: int, wanted: int) -> None:
    """SPEC 2.2 step 4."""
    c = chain_of(usage, {"tokens": str(used), "held_tokens": str(held), "limits": "max_tokens=20"}, {"limits": ""})
    found = usage.unfit(c, {"tokens": str(wanted)})
    assert bool(found) == (wanted > 0 and used + held + wanted > 20)
    usage.hold(c, {"tokens": str(wanted)}, 1)
    usage.charge(c, {"tokens": "3"})
    assert usage.remaining(c) == f"tokens={max(0, 20 - used - held - wanted - 3)}"


@given(st.integers(1, 5), st.integers(1, 8))
def test_the_refusal_that_fills_the_streak_ends_the_run(cap: int, refusals: int) -> None:
    """SPEC 2.2, streak."""
    c, memory = chain_of(streak, {"status": "running", "limits": f"max_denied={cap}"}), streak.hash({})
    raise_streak = getattr(streak, "raise")
    ended = [bool(raise_streak(c, memory, "a", "short_cycle", {})) for _ in range(refusals)]
    assert ended.index(True) + 1 == cap if refusals >= cap else True not in ended
    streak.clear(memory, "a")
    assert memory["f"]["s:a"] is None


def test_an_answer_leaves_out_what_does_not_apply() -> None:
    """Reply: action, reason, names and values; no nil, no empty text."""
    said = list(answer.say("deny", "short_cycle", {"limit": 8, "steps": "", "value": None}).values())
    assert said == ["deny", "short_cycle", "limit", "8"]


def test_a_trace_of_zero_entries_writes_nothing() -> None:
    """trace_max 0 turns the trace off; otherwise the stream is written."""
    assert trace.add("k", {"trace_max": "0"}, 5, {"op": "before"}) is None
    with pytest.raises(Exception, match="no server here: XADD"):
        trace.add("k", {"trace_max": "9", "run_ttl_ms": "5"}, 5, {"op": "before"})


@given(st.dictionaries(NAMES, VALUES, max_size=5), NAMES, VALUES)
def test_a_hash_remembers_what_changed_and_only_that(fields: dict[str, str], name: str, value: str) -> None:
    """Writing what did not change would cost a call and move the expiry."""
    record = hash_.hash(dict(fields))
    hash_.set(record, name, value)
    assert hash_.is_changed(record) == (fields.get(name) != value)
    assert dict(record["f"].items()) == {**fields, name: value}
    hash_.drop(record, name)
    assert name not in dict(record["f"].items())
