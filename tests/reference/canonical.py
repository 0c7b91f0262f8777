"""Arguments -> one text (SPEC 2.1). Equal texts are equal calls."""

from __future__ import annotations

import contextlib
import json
import math
import unicodedata
from typing import Any


class Misuse(Exception):
    """A request the guard answers with an error; `name` is the error's stable name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def dumps(value: Any) -> str:
    """JSON without spaces, members sorted, as derived keys are written."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def parsed(args: Any) -> Any:
    """Arguments as given -> a JSON value: text that is JSON is parsed, nothing at all is `{}`."""
    if isinstance(args, str):
        with contextlib.suppress(ValueError):  # a string that is no JSON stays a string
            args = json.loads(args, object_pairs_hook=_object)
    return {} if args is None or args == "" else args


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise Misuse("bad_argument")
    return members


def normal(value: Any) -> Any:
    """NFC, outer white space trimmed, integral floats as integers; nothing is dropped."""
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value).strip()
    if isinstance(value, float):
        if not math.isfinite(value):
            raise Misuse("bad_argument")
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        return [normal(item) for item in value]
    if isinstance(value, dict):
        if not all(isinstance(name, str) for name in value):
            raise Misuse("bad_argument")
        return _object([(unicodedata.normalize("NFC", name), normal(item)) for name, item in value.items()])
    return value


def dropped(value: Any, volatile: set[str]) -> Any:
    """`value` without null and volatile members, at every depth."""
    if isinstance(value, list):
        return [dropped(item, volatile) for item in value]
    if isinstance(value, dict):
        return {
            name: dropped(item, volatile) for name, item in value.items() if item is not None and name not in volatile
        }
    return value


def members(args: Any, names: list[str]) -> list[Any]:
    """The named members of normalised arguments, null where there is none (`effect_key`, `target_args`)."""
    return [args.get(name) if isinstance(args, dict) else None for name in names]


def at_pointer(value: Any, pointer: str) -> Any:
    """What a JSON pointer finds, None where it finds nothing (a rule `progress`)."""
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value
