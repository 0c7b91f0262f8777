"""Whatever arguments look like, equal calls meet and different ones do not (SPEC 2.1)."""

from __future__ import annotations

import json
import math
import unicodedata
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from guardd import canonical, redaction
from guardd.model.errors import BadArgument

NONE: frozenset[str] = frozenset()
TEXT = st.text(max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
ANYTHING = st.recursive(
    SCALARS | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(TEXT | st.integers(), inner, max_size=4)
    ),
    max_leaves=15,
)
CLEAN_TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
CLEAN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | CLEAN_TEXT,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(CLEAN_TEXT.map(lambda name: unicodedata.normalize("NFC", name)), inner, max_size=4)
    ),
    max_leaves=15,
)


def form(args: Any) -> str:
    return canonical.canonical_json(canonical.strip(canonical.normalise(args), NONE))


@given(ANYTHING | TEXT)
def test_arguments_have_a_form_or_a_named_error(args: Any) -> None:
    """No other exception ever leaves, and a form is UTF-8 that reads back as the value."""
    try:
        value = canonical.normalise(args)
    except BadArgument as error:
        assert error.field.startswith("args")
        assert error.limit
        return
    text = canonical.canonical_json(value)
    text.encode()
    assert json.loads(text) == value


@given(CLEAN, CLEAN)
def test_two_values_share_a_form_only_when_they_are_equal_json(one: Any, other: Any) -> None:
    """Compared without the code under test: the types of JSON, NFC, trimmed, integral floats as integers."""
    assert (canonical.canonical_json(canonical.normalise([one])) == canonical.canonical_json(canonical.normalise([other]))) == (
        plain(one) == plain(other)
    )  # fmt: skip


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return ("object", frozenset((unicodedata.normalize("NFC", name), plain(item)) for name, item in value.items()))
    if isinstance(value, list):
        return ("array", tuple(plain(item) for item in value))
    if isinstance(value, str):
        return ("string", unicodedata.normalize("NFC", value).strip())
    if isinstance(value, bool) or value is None:
        return ("word", str(value))
    return ("number", int(value) if value == math.floor(value) else value)


@given(st.dictionaries(CLEAN_TEXT.map(lambda name: unicodedata.normalize("NFC", name)), CLEAN, max_size=5))
def test_text_nesting_and_order_of_an_object_are_no_identity(args: dict[str, Any]) -> None:
    backwards = dict(reversed(args.items()))
    assert form({"deep": [args]}) == form({"deep": [backwards]}) == form(json.dumps({"deep": [backwards]}, indent=2))
    assert form({"deep": (args,)}) == form({"deep": [args]})


@given(CLEAN_TEXT, CLEAN)
def test_names_are_nfc_and_twice_the_same_is_refused(name: str, item: Any) -> None:
    composed, decomposed = unicodedata.normalize("NFC", name), unicodedata.normalize("NFD", name)
    assert form({decomposed: item}) == form({composed: item})
    if composed != decomposed:
        try:
            canonical.normalise({composed: 1, decomposed: 1})
        except BadArgument:
            return
        raise AssertionError("one name stood twice")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_double_reads_back_as_itself(number: float) -> None:
    assert json.loads(form([number])) == [number]
    assert "e+" not in form([number])


@given(CLEAN)
def test_redaction_is_stable_and_leaves_names_of_honest_values(value: Any) -> None:
    """Redacting twice changes nothing more, and a value without a change is the same object."""
    normalised = canonical.normalise([value])
    once = redaction.redact(normalised, key=b"k")
    assert redaction.redact(once, key=b"k") == once
    assert (once is normalised) == (once == normalised)


SECRETISH = st.lists(
    st.sampled_from(
        ["password", "token", "Bearer ", "Basic ", "=", ": ", '"', "'", "\\", "://", "@", "a:b", "sk-", "eyJ", ".", "cookie", "-----BEGIN ",
         "PRIVATE KEY-----", "4111 1111 1111 1111", " ", "\n", "--", "curl -u ", "abcDEF123", "[redacted:00000000]", ",", "authorization"],
    ),
    max_size=14,
).map("".join)  # fmt: skip


@given(SECRETISH)
def test_texts_made_of_pieces_of_secrets_come_to_rest(text: str) -> None:
    """A log line may pass several times, and the quick look never spares what would be replaced."""
    clean = redaction.redact_text(text, key=b"k")
    assert clean is text or redaction.may_hold_secrets(text)
    twice = redaction.redact_text(clean, key=b"k")
    assert redaction.redact_text(twice, key=b"k") == twice
