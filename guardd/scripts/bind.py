"""Binds a typed stub to the Lua file of its name; one that disagrees with the header fails at import.

A stub makes an `Invocation`: script, keys and arguments, ready for the store.
It sends nothing itself, so that several may share one round trip.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, NamedTuple, NewType, get_type_hints

from guardd.keys import Key
from guardd.scripts.loader import Script, ScriptError, load

Map = NewType("Map", str)
"""A packed record, `name=value name=value`; made by `packed`."""


class Invocation(NamedTuple):
    """A script with everything it needs."""

    script: Script
    keys: list[str]
    args: list[str | int]


_TYPES = {"str": str, "int": int, "int?": int | None, "map": Map}
STUBS: dict[str, Callable[..., Invocation]] = {}


def packed(record: dict[str, object]) -> Map:
    """Names and values as the scripts read them; empty and absent members are left out.

    Values hold no white space: they are numbers, digests or words. Free text goes into an argument of its own.
    """
    return Map(" ".join(f"{name}={value}" for name, value in record.items() if value is not None and value != ""))


def script(name: str) -> Callable[[Callable[..., None]], Callable[..., Invocation]]:
    """Binds `lua/<name>.lua`. The parameters are its KEYS, then its ARGV, with the names and types of the header."""

    def bind(stub: Callable[..., None]) -> Callable[..., Invocation]:
        source = load(name)
        hints = get_type_hints(stub)
        expected: list[tuple[str, Any]] = [(slot.name, list[Key] if slot.is_rest else Key) for slot in source.keys]
        expected += [(slot.name, _TYPES[slot.type]) for slot in source.args]
        actual = [(parameter, hints[parameter]) for parameter in inspect.signature(stub).parameters]
        if actual != expected:
            padded = zip_longest(actual, expected)
            differing = next(pair for pair in padded if pair[0] != pair[1])
            raise ScriptError(f"{name}.lua and its stub disagree: stub says {differing[0]}, header says {differing[1]}")
        single = [slot.name for slot in source.keys if not slot.is_rest]
        rest = [slot.name for slot in source.keys if slot.is_rest]
        names = [slot.name for slot in source.args]

        def invoke(**given: Any) -> Invocation:
            keys: list[str] = [given[each] for each in single]
            for each in rest:
                keys += given[each]
            return Invocation(source, keys, ["" if (value := given[each]) is None else value for each in names])

        invoke.__name__ = stub.__name__
        invoke.__doc__ = stub.__doc__
        STUBS[name] = invoke
        return invoke

    return bind
