"""Runs one Lua include alone, without a server, in the Lua 5.1 that Redis and Valkey carry."""

from __future__ import annotations

from typing import Any

from lupa import lua51

from guardd.scripts.loader import _include


def include(name: str) -> Any:
    """The table that `include/<name>.lua` makes; `redis.call` in it fails, for these tests need no server."""
    lua = lua51.LuaRuntime(unpack_returned_tuples=True)
    lua.execute("redis = { call = function(...) error('no server here: ' .. tostring((...))) end }")
    lines = [line for line, _, _ in _include(name, set(), ("test",))]
    table = lua.execute("\n".join([*lines, f"return {name}"]))
    table_from = lua.table_from
    return Include(table, table_from, lua)


class Include:
    """Attribute access to the include's functions; Python dicts and lists become tables."""

    def __init__(self, table: Any, table_from: Any, lua: Any) -> None:
        self._table, self._table_from, self._lua = table, table_from, lua

    def __getattr__(self, name: str) -> Any:
        function = self._table[name]
        return lambda *args: function(*(self.to_lua(arg) for arg in args))

    def to_lua(self, value: Any) -> Any:
        """A Python value as Lua sees it."""
        if isinstance(value, dict):
            return self._table_from({key: self.to_lua(item) for key, item in value.items()})
        if isinstance(value, list):
            return self._table_from([self.to_lua(item) for item in value])
        return value

    def hash(self, fields: dict[str, str]) -> Any:
        """A hash as `hash.read` gives it."""
        return self.to_lua({"key": "k", "f": fields, "changed": {}, "dropped": {}})
