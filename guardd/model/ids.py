"""Names: run paths, call ids, tools, agents, keys. What is allowed, and the lineage in a path (SPEC 1, 5)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from guardd.model.errors import BadArgument

PATH_BYTES_MAX = 384
SEGMENT_BYTES_MAX = 64
CALL_ID_BYTES_MAX = 128
NAME_BYTES_MAX = 255
LABELS_MAX = 16

_ALPHABET = "A-Z a-z 0-9 . _ : -"
_WORD = re.compile(rf"[A-Za-z0-9._:-]{{1,{SEGMENT_BYTES_MAX}}}")
_PATH = re.compile(rf"{_WORD.pattern}(?:/{_WORD.pattern})*")
_CALL_ID = re.compile(rf"[\x21-\x7e]{{1,{CALL_ID_BYTES_MAX}}}")
# Control characters, line and paragraph separators and what reverses the direction of text: none can be seen,
# and each makes a line of a log or a terminal show something else. Blanks and joiners of other scripts (the
# ideographic space, the joiner inside an emoji) belong to honest names.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ufffe\uffff]")


def check_run(run: str) -> str:
    """A run's path: segments of 1 to 64 of A-Z a-z 0-9 . _ : - joined by `/`, at most 384 bytes.

    Run ids become parts of keys, so nothing else is ever let through.
    Raises: BadArgument.
    """
    if not isinstance(run, str):
        raise BadArgument("a run is a text", field="run", value=type(run).__name__, limit="a path")
    if len(run) > PATH_BYTES_MAX:  # before the cache, which then holds short paths only
        raise BadArgument("the run's path is too long", field="run", value=run, limit=f"1..{PATH_BYTES_MAX} bytes")
    return _check_path(run)


@lru_cache(maxsize=8192)
def _check_path(run: str) -> str:
    if not _PATH.fullmatch(run):
        raise BadArgument(
            "a segment of the run's path is malformed",
            field="run",
            value=run,
            limit=f"segments of 1..{SEGMENT_BYTES_MAX} of {_ALPHABET}",
        )
    return run


def check_call_id(call: str, *, field: str = "call") -> str:
    """An id of a call or an operation: 1 to 128 printable ASCII characters without blanks.

    Raises: BadArgument.
    """
    if not isinstance(call, str) or not _CALL_ID.fullmatch(call):
        raise BadArgument(
            "an id has printable ASCII without blanks", field=field, value=call, limit=f"1..{CALL_ID_BYTES_MAX} bytes"
        )
    return call


def check_name(field: str, value: str) -> str:
    """A tool, agent or key: printable UTF-8 of 1 to 255 bytes; an agent may be empty.

    Raises: BadArgument.
    """
    bytes_min = 0 if field == "agent" else 1
    limit = f"{bytes_min}..{NAME_BYTES_MAX} bytes of printable UTF-8"
    if not isinstance(value, str):
        raise BadArgument("a name is a text", field=field, value=type(value).__name__, limit=limit)
    try:
        size_bytes = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError:
        raise BadArgument(
            "a name holds half a surrogate pair", field=field, value=ascii(value)[1:-1], limit=limit
        ) from None
    if not bytes_min <= size_bytes <= NAME_BYTES_MAX:
        raise BadArgument("a name is empty or too long", field=field, value=value, limit=limit)
    if (value.isascii() and value.isprintable()) or not _UNPRINTABLE.search(value):
        return value
    raise BadArgument("a name holds what cannot be printed", field=field, value=ascii(value)[1:-1], limit=limit)


def check_labels(labels: Mapping[str, str]) -> None:
    """Labels of a run: at most 16; names like segments of a path, values printable UTF-8 of 0 to 255 bytes.

    Raises: BadArgument.
    """
    if len(labels) > LABELS_MAX:
        raise BadArgument("too many labels", field="labels", value=len(labels), limit=f"{LABELS_MAX} labels")
    for name, value in labels.items():
        if not _WORD.fullmatch(name):
            raise BadArgument(
                "a label's name is malformed", field="labels", value=name,
                limit=f"1..{SEGMENT_BYTES_MAX} of {_ALPHABET}",
            )  # fmt: skip
        if value:
            check_name("labels", value)


def check_reason(reason: str) -> str:
    """The word of a kill: 1 to 64 of A-Z a-z 0-9 . _ : -

    Raises: BadArgument.
    """
    if not isinstance(reason, str) or not _WORD.fullmatch(reason):
        raise BadArgument(
            "a kill has a word as its reason",
            field="reason",
            value=reason,
            limit=f"1..{SEGMENT_BYTES_MAX} of {_ALPHABET}",
        )
    return reason


def root(run: str) -> str:
    """The first segment: the run of the whole tree."""
    return run.partition("/")[0]


@lru_cache(maxsize=8192)
def parents(run: str) -> tuple[str, ...]:
    """The ancestors of a run, root first; none for a root."""
    segments = run.split("/")
    return tuple("/".join(segments[:level]) for level in range(1, len(segments)))
