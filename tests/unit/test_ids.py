"""Names: what is let into keys, and the lineage in a path (SPEC 1, 5)."""

from __future__ import annotations

from typing import Any

import pytest

from guardd.model import ids
from guardd.model.errors import BadArgument


@pytest.mark.parametrize("run", ["r", "run_42", "run_42/researcher", "A.b:c-d/0", "x" * 64, "/".join(["x" * 63] * 6)])
def test_paths_of_the_alphabet_are_runs(run: str) -> None:
    assert ids.check_run(run) == run


@pytest.mark.parametrize(
    "run",
    [
        "", "/", "a/", "/a", "a//b", "a b", "a\n", "a/\n", "ä", "a{b}", "a*", "a\x00", "x" * 65, "a/" + "x" * 65,
        "/".join(["x" * 63] * 6) + "y/z", None, 1, b"a", [], {},
    ],
)  # fmt: skip
def test_anything_else_is_no_run(run: Any) -> None:
    with pytest.raises(BadArgument) as caught:
        ids.check_run(run)
    assert caught.value.field == "run"
    assert caught.value.limit


def test_a_refused_run_is_refused_again() -> None:
    for _ in range(2):
        with pytest.raises(BadArgument):
            ids.check_run("a b")


def test_lineage_is_in_the_path() -> None:
    assert ids.parents("a/b/c") == ("a", "a/b")
    assert ids.parents("a") == ()
    assert (ids.root("a/b/c"), ids.root("a")) == ("a", "a")


@pytest.mark.parametrize("call", ["c0", "x" * 128, "!~/{}"])
def test_ids_are_visible_ascii(call: str) -> None:
    assert ids.check_call_id(call) == call


@pytest.mark.parametrize("call", ["", "x" * 129, "a b", "a\n", "é", None, 7])
def test_other_ids_are_refused_under_their_own_name(call: Any) -> None:
    with pytest.raises(BadArgument) as caught:
        ids.check_call_id(call, field="op_id")
    assert caught.value.field == "op_id"


@pytest.mark.parametrize(
    "name", ["search", "web search", "é" * 127, "日本\u3000東京", "👩\u200d💻", "a\u00a0b", '["VPN",2]', "x" * 255]
)
def test_printable_names_of_any_script_are_taken(name: str) -> None:
    assert ids.check_name("tool", name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x" * 256,
        "é" * 128,
        "a\nb",
        "a\x00",
        "a\x7f",
        "a\x85",
        "a\u2028",
        "a\u202eb",
        "a\u2066",
        "\ud800",
        None,
        3,
        b"a",
        [],
    ],
)
def test_names_that_cannot_be_printed_or_are_too_long_are_refused(name: Any) -> None:
    with pytest.raises(BadArgument) as caught:
        ids.check_name("tool", name)
    assert caught.value.field == "tool"
    assert "255 bytes" in str(caught.value.limit)
    assert str(caught.value.as_dict().get("value", "")).isprintable()


def test_only_an_agent_may_be_nameless() -> None:
    assert ids.check_name("agent", "") == ""
    with pytest.raises(BadArgument):
        ids.check_name("tool", "")


@pytest.mark.parametrize("reason", ["incident_stop", "x" * 64, "a.b:c-d"])
def test_a_kill_has_a_word(reason: str) -> None:
    assert ids.check_reason(reason) == reason


@pytest.mark.parametrize("reason", ["", "x" * 65, "two words", "a\n", "a/b", "é", None, 1])
def test_anything_else_is_no_word(reason: Any) -> None:
    with pytest.raises(BadArgument) as caught:
        ids.check_reason(reason)
    assert caught.value.field == "reason"


@pytest.mark.parametrize(
    "labels",
    [
        {f"k{n}": "v" for n in range(17)}, {"": "v"}, {"k" * 65: "v"}, {"a=b": "v"}, {"a b": "v"}, {"a\nb": "v"},
        {"k": "v" * 256}, {"k": "a\nb"},
    ],
)  # fmt: skip
def test_labels_beyond_their_limits_are_named(labels: dict[str, str]) -> None:
    with pytest.raises(BadArgument) as raised:
        ids.check_labels(labels)
    assert raised.value.field == "labels" and raised.value.limit


def test_labels_at_their_limits_are_taken() -> None:
    ids.check_labels({f"k{n}": "v" * 255 for n in range(16)} | {"k0": ""})
