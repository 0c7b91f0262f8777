"""The canonical form: what is the same call, and what must stay different (SPEC 2.1)."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guardd import canonical
from guardd.model.errors import BadArgument, EffectKeyMissing

NONE: frozenset[str] = frozenset()
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False) | TEXT
)
NAMES = TEXT.map(lambda text: unicodedata.normalize("NFC", text))
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=20
)
OBJECTS = st.dictionaries(NAMES, JSON, max_size=5)


def form(args: Any, volatile: frozenset[str] = NONE) -> str:
    return canonical.canonical_json(canonical.strip(canonical.normalise(args), volatile))


def shuffled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: shuffled(value[name]) for name in reversed(list(value))}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


@given(OBJECTS)
def test_member_order_at_any_depth_is_no_identity(args: dict[str, Any]) -> None:
    """Keys are sorted at every depth."""
    assert form(args) == form(shuffled(args))


@given(OBJECTS)
def test_the_json_text_of_arguments_is_the_same_call(args: dict[str, Any]) -> None:
    """Frameworks pass arguments as objects or as JSON strings."""
    assert form(args) == form(json.dumps(args)) == form(" " + json.dumps(args, ensure_ascii=False) + "\n")


@given(JSON)
def test_normalising_twice_changes_nothing(value: Any) -> None:
    """A form is a fixed point, but for strings at the top, which are parsed."""
    once = canonical.normalise([value])
    assert canonical.normalise(once) == once
    assert json.loads(form([value])) == canonical.strip(once, NONE)


@given(TEXT)
def test_unicode_forms_and_outer_blanks_are_no_identity(text: str) -> None:
    """NFC, trimmed."""
    assert form({"q": unicodedata.normalize("NFD", text)}) == form({"q": text}) == form({"q": f" \t{text}\n"})


@given(st.integers(-(2**53), 2**53))
def test_an_integral_float_is_the_integer(number: int) -> None:
    """1.0 and 1 are one call."""
    assert form({"n": float(number)}) == form({"n": number})
    assert form({"n": -0.0}) == form({"n": 0})


@given(OBJECTS, st.text("abc", min_size=1, max_size=3))
def test_null_and_volatile_members_are_dropped_at_every_depth(args: dict[str, Any], name: str) -> None:
    """And nothing else is."""
    with_noise = {**args, "deep": [{"x": {name: 1, "kept": 2}}]}
    without = {key: value for key, value in args.items() if key != name} | {"deep": [{"x": {"kept": 2}}]}
    assert form(with_noise, frozenset({name})) == form(without, frozenset({name}))
    assert form({"a": None, "b": {"c": None}}) == form({"b": {}})


@pytest.mark.parametrize("args", [None, "", "   ", {}, "{}", "null"])
def test_absent_null_and_blank_arguments_are_an_empty_object(args: Any) -> None:
    assert form(args) == "{}"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"v": 1}, {"v": "1"}), ({"v": 1}, {"v": True}), ({"v": "1"}, {"v": True}), ({"v": 0}, {"v": False}),
        ({"v": [1, 2]}, {"v": [2, 1]}), ({"v": "a"}, {"v": "A"}), ({"v": "a b"}, {"v": "a  b"}),
        ({"v": [None, 1]}, {"v": [1]}), ({"a": {}}, {}), ({"a": []}, {}), ({"a": ""}, {}), ({"v": 1}, {"v": 1.5}),
        ({"v": 2**53}, {"v": 2**53 + 1}), ({"a": {"b": 1}}, {"a": {"c": 1}}), ({"a": {"b": 1}}, {"a.b": 1}),
        ({"cursor": "x1"}, {"cursor": "x2"}), ([], {}), ("text", {"text": None}), ({"v": '{"a":1}'}, {"v": {"a": 1}}),
        ({"v": 0.1}, {"v": 0.1000000001}), ("[1]", "[2]"), ("NaN", "Infinity"),
    ],
)  # fmt: skip
def test_what_must_stay_different(one: Any, other: Any) -> None:
    assert form(one) != form(other)


def test_a_string_that_is_no_json_stays_a_string() -> None:
    """Nor is a JSON string inside the arguments parsed."""
    assert canonical.normalise(" ls -la ") == "ls -la"
    assert canonical.normalise("{not json") == "{not json"
    assert canonical.normalise("NaN") == "NaN"
    assert canonical.normalise('{"a": "{}"}') == {"a": "{}"}


def test_nesting_is_refused_beyond_its_limit_and_taken_up_to_it() -> None:
    """32 levels, in values and in JSON text."""
    deep: Any = 1
    for _ in range(canonical.NESTING_MAX):
        deep = [deep]
    assert canonical.normalise(deep) == canonical.normalise(json.dumps(deep)) == deep
    objects: Any = {}
    for _ in range(canonical.NESTING_MAX):
        objects = {"a": objects}
    with pytest.raises(BadArgument, match="too deep"):
        canonical.normalise(objects)
    assert canonical.normalise(objects["a"]) == objects["a"]
    for too_deep in ([deep], {"a": deep}, json.dumps([deep]), '{"a":' * 10_000):
        with pytest.raises(BadArgument, match="too deep"):
            canonical.normalise(too_deep)


def test_brackets_inside_strings_are_no_nesting() -> None:
    assert canonical.normalise(json.dumps({"q": "[" * 100 + '\\"' + "{" * 100})) == {"q": "[" * 100 + '\\"' + "{" * 100}


@pytest.mark.parametrize("text", ['{"a": 1e999}', "[-1e999]", '{"a": Infinity}', "[NaN]"])
def test_numbers_that_are_not_finite_are_refused_in_text_too(text: str) -> None:
    with pytest.raises(BadArgument, match="not finite"):
        canonical.normalise(text)


@given(st.lists(TEXT, min_size=2, max_size=2), st.lists(TEXT, min_size=2, max_size=2))
def test_digests_join_their_parts_unambiguously(one: list[str], other: list[str]) -> None:
    """`a` + `b:x` and `a:b` + `x` never meet."""
    assert (canonical.fingerprint(*one) == canonical.fingerprint(*other)) == (one == other)


def test_the_names_of_a_record_are_of_different_domains() -> None:
    """A provider learns nothing that opens the ledger."""
    names = {
        canonical.record_digest("r", "t", "k"), canonical.record_digest("*", "t", "k"), canonical.record_digest("r", "tk", ""),
        canonical.provider_key("r", "t", "k").removeprefix("guardd-"),
    }  # fmt: skip
    assert len({name[:32] for name in names}) == 4
    assert len(canonical.short(canonical.fingerprint("t", "{}"))) == 16


def test_effect_keys_read_the_arguments_before_anything_is_dropped() -> None:
    """SPEC 2.1, 2.6."""
    args = canonical.normalise({"title": " VPN ", "prio": 2.0, "request_id": "a", "x": None})
    assert canonical.effect_key(args, ["title", "prio"]) == '["VPN",2]'
    assert canonical.effect_key(args, ["request_id"]) == '["a"]'
    for missing in ("x", "y"):
        with pytest.raises(EffectKeyMissing) as caught:
            canonical.effect_key(args, ["title", missing])
        assert caught.value.field == f"args.{missing}"
    with pytest.raises(EffectKeyMissing):
        canonical.effect_key("text", ["title"])


def test_a_target_ignores_the_other_arguments() -> None:
    """A missing member counts as null."""
    one = canonical.target("t", {"customer": 7, "text": "a"}, ["customer"])
    assert one == canonical.target("t", {"customer": 7, "text": "b"}, ["customer"])
    assert one != canonical.target("t", {"customer": 8}, ["customer"])
    assert canonical.target("t", {}, ["customer"]) == canonical.target("t", {"customer": None}, ["customer"])


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"a": {"b": [0, 1, 2, b"x"]}}, "args.a.b[3]"), ('{"a": [{"b": 1e999}]}', "args.a[0].b"),
        ({"a": {1: 2}}, "args.a"), ('{"a": {"b": 1, "b": 2}}', "args.a.b"), ({"é": 1, "e\u0301": 2}, "args.e\\u0301"),
        ({"a": ["\ud800"]}, "args.a[0]"), ({"a": [float("nan")]}, "args.a[0]"), ({"n": 10**4300}, "args.n"),
        ({1, 2}, "args"), ([object()], "args[0]"),
    ],
)  # fmt: skip
def test_what_has_no_form_is_refused_with_its_path(args: Any, field: str) -> None:
    with pytest.raises(BadArgument) as caught:
        canonical.normalise(args)
    assert caught.value.field == field
    assert caught.value.limit


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "-1e999", "1" * 5000, "[" + "x" * 9])
def test_a_word_that_is_no_number_of_ours_stays_text(text: str) -> None:
    assert canonical.normalise(text) == text


def test_an_integer_of_too_many_digits_is_refused_by_name() -> None:
    """Python itself raises a bare ValueError when it reads or writes one."""
    for args in ({"n": 10**5000}, f'{{"n": 1{"0" * 5000}}}'):
        with pytest.raises(BadArgument, match="too long"):
            canonical.normalise(args)
    assert form({"n": 10**4299}) == '{"n":1' + "0" * 4299 + "}"


def test_a_blank_json_string_is_an_empty_object_too() -> None:
    assert canonical.normalise('"  "') == {}


def test_the_size_limit_is_exact_and_counts_what_is_dropped_later() -> None:
    room = canonical.ARGS_BYTES_MAX - len('{"a":""}')
    for char in ("x", "é"):
        fits = char * (room // len(char.encode()))
        assert canonical.normalise({"a": fits}) == {"a": fits}
        with pytest.raises(BadArgument, match="too large"):
            canonical.normalise({"a": fits + char})
    with pytest.raises(BadArgument, match="too large"):
        canonical.normalise({"request_id": "x" * (room + 1)})
    for longer_than_given in ("[" + ",".join(["1e300"] * 1000) + "]", [1e-7] * 50_000):
        with pytest.raises(BadArgument, match="too large"):
            canonical.normalise(longer_than_given)


def test_half_a_surrogate_pair_is_named_without_its_text() -> None:
    """The text may be a secret, and errors are logged."""
    with pytest.raises(BadArgument) as caught:
        canonical.normalise({"password": "hunter2\ud800"})
    assert "hunter2" not in str(caught.value.as_dict())
    assert caught.value.value == "U+D800"


def test_digests_never_change() -> None:
    """Stored windows, records and provider keys live longer than a release."""
    full = canonical.fingerprint("refund", '{"order":"A-1"}')
    assert full == "0ed66df318ae3cae3b07193fcc69905c2c6c5dd0cc63fac0b54f341949e4df7e"
    assert canonical.short(full) == "DtZt8xiuPK47Bxk_"
    assert canonical.target("t", {"c": 7}, ["c"]) == "25GoxOrBEQb_Ky09"
    assert canonical.record_digest("r", "t", "k") == "acdc7d0eed9fc836668c8fc425d83576f3beffb9"
    assert canonical.provider_key("r", "t", "k") == "guardd-0ab30b01cb03a18a7a5388952a39dfd3"
    assert canonical.state_digest({"b": 1, "a": [" x "]}) == "fc59c2c848dd"
