"""Limits: text and back, and what unlimited means where a loop is looked for (SPEC 2.10)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from guardd.model.limits import AGENT, LIMITS, REFERENCE, changes_text, check_limits, limits_text, parse_limits

VALUES = st.fixed_dictionaries(
    {
        name: st.sampled_from(limit.words)
        if limit.words
        else st.integers(limit.min, limit.max)
        | (st.none() if limit.may_be_unlimited and not limit.unlimited_is_max else st.nothing())
        for name, limit in LIMITS.items()
    }
)


@given(VALUES)
def test_limits_read_back_from_their_text(limits: dict[str, int | str | None]) -> None:
    assert parse_limits(limits_text(check_limits(limits))) == limits


def test_an_unlimited_search_for_loops_looks_as_far_as_it_can() -> None:
    assert check_limits({"max_cycle_period": None, "cycle_window": None}) == {
        "max_cycle_period": 16,
        "cycle_window": 1024,
    }


def test_a_cap_that_is_taken_away_is_said_with_a_dash() -> None:
    assert changes_text({"max_steps": None, "max_tokens": 5}) == "max_steps=- max_tokens=5"


def test_the_numbers_of_the_two_policies() -> None:
    """SPEC 2.10, spot by spot."""
    assert (REFERENCE.limits["max_steps"], REFERENCE.limits["max_denied"], REFERENCE.limits["on_refusal"]) == (
        20,
        1,
        "stop",
    )
    assert (AGENT.limits["max_steps"], AGENT.limits["max_denied"], AGENT.limits["on_refusal"]) == (60, 3, "deny")
    assert (AGENT.limits["cycle_window"], AGENT.limits["max_same_call"], AGENT.limits["max_no_progress"]) == (16, 3, 8)
    assert "timestamp" in REFERENCE.volatile_args and "timestamp" not in AGENT.volatile_args
