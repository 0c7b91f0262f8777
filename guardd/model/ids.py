"""Names: run paths, call ids, tools, agents, keys. What is allowed, and the lineage in a path (SPEC 1, 5)."""

from __future__ import annotations

import re
from functools import lru_cache

from guardd.model.errors import BadArgument

PATH_BYTES_MAX = 384
SEGMENT_BYTES_MAX = 64
CALL_ID_BYTES_MAX = 128
NAME_BYTES_MAX = 255

_SEGMENT = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_CALL_ID = re.compile(r"[\x21-\x7e]{1,128}")
_REASON = re.compile(r"[A-Za-z0-9._:-]{1,64}")


@lru_cache(maxsize=8192)
def check_run(run: str) -> str:
    """A run's path: segments of 1 to 64 of A-Z a-z 0-9 . _ : - joined by `/`, at most 384 bytes.

    Run ids become parts of keys, so nothing else is ever let through.
    Raises: BadArgument.
    """
    if not isinstance(run, str) or len(run) > PATH_BYTES_MAX or not run.isascii():
        raise BadArgument("a run is a short ASCII path", field="run", value=run, limit=f"1..{PATH_BYTES_MAX} bytes")
    for segment in run.split("/"):
        if not _SEGMENT.fullmatch(segment):
            raise BadArgument(
                "a segment of the run's path is malformed", field="run", value=run,
                limit=f"segments of 1..{SEGMENT_BYTES_MAX} of A-Z a-z 0-9 . _ : -",
            )  # fmt: skip
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
    try:
        size = len(value.encode()) if isinstance(value, str) else -1
    except UnicodeEncodeError:
        size = -1
    if size > NAME_BYTES_MAX or size < (0 if field == "agent" else 1) or not value.isprintable():
        raise BadArgument(
            "a name is printable text", field=field, value=value, limit=f"1..{NAME_BYTES_MAX} bytes of UTF-8"
        )
    return value


def check_reason(reason: str) -> str:
    """The word of a kill: 1 to 64 of A-Z a-z 0-9 . _ : -

    Raises: BadArgument.
    """
    if not isinstance(reason, str) or not _REASON.fullmatch(reason):
        raise BadArgument(
            "a kill has a word as its reason", field="reason", value=reason, limit="1..64 of A-Z a-z 0-9 . _ : -"
        )
    return reason


def root(run: str) -> str:
    """The first segment: the run of the whole tree."""
    return run.partition("/")[0]


@lru_cache(maxsize=8192)
def parents(run: str) -> tuple[str, ...]:
    """The ancestors of a run, root first; none for a root."""
    segments = run.split("/")
    return tuple("/".join(segments[:depth]) for depth in range(1, len(segments)))
