"""Loads the Lua of one operation: header contract, includes, bindings, line map.

A script file starts with a header that is checked and used, never prose alone:

    -- KEYS[1]  op_key    hash  ...      KEYS[4+] run_keys hash ...   (the rest of KEYS)
    -- ARGV[1]  lease_ms  int   ...      types: str, int, int? (empty: nil), map (name=value ...)
    -- RETURNS / ERRORS / EXPIRES / FLAGS
    --@include name                      a table made by include/name.lua
    --@bind                              here the names of the header become locals

`--@bind` is the only place where KEYS and ARGV turn into names, so header and
code cannot disagree. Scripts use the subset that Redis, Valkey and fakeredis
share: no cjson, cmsgpack, bit or struct, and no shebang line (the store adds
`#!lua flags=...` where the server knows it).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path

_HEADER = re.compile(r"^-- (KEYS|ARGV)\[(\d+)(\+?)\]\s+(\w+)\s+(\S+)\s+(.*)$")
_FACT = re.compile(r"^-- (RETURNS|ERRORS|EXPIRES|FLAGS)\s+(.*)$")
_INCLUDE = re.compile(r"^--@include (\w+)$")
_KEY_TYPES = frozenset({"hash", "stream", "zset"})
_ARG_TYPES = frozenset({"str", "int", "int?", "map"})
_FLAGS = frozenset({"-", "allow-oom"})
_FORBIDDEN = re.compile(
    r"\b(cjson|cmsgpack|bit|struct)\.|\bloadstring\b|\brequire\b|\bmath\.random\b|\"(?:KEYS|SCAN|HSCAN|SSCAN|ZSCAN)\""
)


class ScriptError(Exception):
    """A Lua file breaks its contract. Raised at import: a broken build never starts."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One KEYS or ARGV entry of a header."""

    name: str
    type: str
    is_rest: bool = False


@dataclass(frozen=True, slots=True)
class Script:
    """A script ready for the server.

    text:   without the `#!lua` line.
    origin: for each line of `text`, the file and line it came from (error messages of the server count lines).
    """

    name: str
    text: str
    keys: tuple[Slot, ...]
    args: tuple[Slot, ...]
    flags: tuple[str, ...]
    errors: tuple[str, ...]
    origin: tuple[tuple[str, int], ...] = field(repr=False, default=())

    @property
    def makes_runs(self) -> bool:
        """True when the script makes runs that are missing: it is told what to make them with."""
        return any(slot.name == "birth_record" for slot in self.args)

    def locate(self, line: int) -> str:
        """`file:line` of a line number in a server's error message, counted from 1 without the shebang line."""
        if 1 <= line <= len(self.origin):
            file, number = self.origin[line - 1]
            return f"{file}:{number}"
        return f"{self.name}.lua:?"


def lua_root() -> Path:
    """The folder of the Lua files: beside the package in a checkout, inside it in a wheel."""
    packaged = Path(str(resources.files("guardd"))) / "_lua"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "lua"


def script_names() -> list[str]:
    """Names of all operations in the folder."""
    return sorted(path.stem for path in lua_root().glob("*.lua"))


@cache
def load(name: str) -> Script:
    """Reads, checks and assembles one script.

    Raises: ScriptError: the header, an include or the allowed subset is broken.
    """
    source = (lua_root() / f"{name}.lua").read_text(encoding="utf-8").splitlines()
    keys, args, facts = _header(name, source)
    lines: list[tuple[str, str, int]] = []
    included: set[str] = set()
    has_bind = False
    for number, line in enumerate(source, start=1):
        if match := _INCLUDE.match(line):
            lines.extend(_include(match[1], included, (name,)))
        elif line == "--@bind":
            has_bind = True
            lines.extend((text, f"{name}.lua", number) for text in _bind(keys, args))
        else:
            lines.append((line, f"{name}.lua", number))
    if not has_bind:
        raise ScriptError(f"{name}.lua: no --@bind")
    text = "\n".join(line for line, _, _ in lines) + "\n"
    code = "\n".join(line for line, _, _ in lines if not line.lstrip().startswith("--"))
    if found := _FORBIDDEN.search(code):
        raise ScriptError(f"{name}.lua: {found[0]!r} is outside the subset that all servers share")
    for path in sorted((lua_root() / "include").glob("*.lua")):
        if path.stem not in included and re.search(rf"(?<![\w.\"]){path.stem}\.\w+\(", code):
            raise ScriptError(f"{name}.lua: uses {path.stem} and does not include it")
    if re.search(r"\b(KEYS|ARGV)\b", "\n".join(line for line in source if not line.startswith("--"))):
        raise ScriptError(f"{name}.lua: KEYS and ARGV are named in the header only")
    flags = tuple(flag for flag in facts["FLAGS"].split() if flag != "-")
    if unknown := set(facts["FLAGS"].split()) - _FLAGS:
        raise ScriptError(f"{name}.lua: unknown flags {sorted(unknown)}")
    errors = tuple(word for word in facts["ERRORS"].split() if word != "-")
    return Script(name, text, keys, args, flags, errors, tuple((file, number) for _, file, number in lines))


def _header(name: str, source: list[str]) -> tuple[tuple[Slot, ...], tuple[Slot, ...], dict[str, str]]:
    slots: dict[str, list[Slot]] = {"KEYS": [], "ARGV": []}
    facts: dict[str, str] = {}
    if not source or not re.match(rf"^-- {name}: \S", source[0]):
        raise ScriptError(f"{name}.lua: the first line says `-- {name}: what it does`")
    for line in source:
        if not line.startswith("--"):
            break
        if match := _HEADER.match(line):
            kind, number, rest, slot, type_, _ = match.groups()
            expected = len(slots[kind]) + 1
            if int(number) != expected or (slots[kind] and slots[kind][-1].is_rest):
                raise ScriptError(f"{name}.lua: {kind}[{number}] stands where {kind}[{expected}] is due")
            if type_ not in (_KEY_TYPES if kind == "KEYS" else _ARG_TYPES):
                raise ScriptError(f"{name}.lua: {kind}[{number}] has the unknown type {type_!r}")
            slots[kind].append(Slot(slot, type_, bool(rest)))
        elif match := _FACT.match(line):
            facts[match[1]] = match[2]
    if missing := {"RETURNS", "ERRORS", "EXPIRES", "FLAGS"} - set(facts):
        raise ScriptError(f"{name}.lua: the header lacks {sorted(missing)}")
    if not slots["KEYS"]:
        raise ScriptError(f"{name}.lua: the header declares no key")
    for slot in slots["KEYS"]:
        if slot.name not in facts["EXPIRES"]:
            raise ScriptError(f"{name}.lua: EXPIRES says nothing of {slot.name}")
    return tuple(slots["KEYS"]), tuple(slots["ARGV"]), facts


def _include(name: str, included: set[str], chain: tuple[str, ...]) -> Iterator[tuple[str, str, int]]:
    """The lines of an include and of what it includes, each once; a table named as its file."""
    if name in chain:
        raise ScriptError(f"include/{name}.lua includes itself by way of {' > '.join(chain)}")
    if name in included:
        return
    path = lua_root() / "include" / f"{name}.lua"
    if not path.is_file():
        raise ScriptError(f"{chain[-1]}.lua: include/{name}.lua does not exist")
    source = path.read_text(encoding="utf-8").splitlines()
    if (
        not source
        or not re.match(rf"^-- {name}: \S", source[0])
        or source[-1] != f"return {name}"
        or f"local {name} = {{}}" not in source
    ):
        raise ScriptError(f"include/{name}.lua: is `-- {name}: ...`, then `local {name} = {{}}` ... `return {name}`")
    body: list[tuple[str, str, int]] = []
    for number, line in enumerate(source, start=1):
        if match := _INCLUDE.match(line):
            yield from _include(match[1], included, (*chain, name))
        else:
            body.append((line, f"include/{name}.lua", number))
    included.add(name)
    # A block, not a function: a script runs anew for every call, and each closure it makes costs.
    yield f"local {name} = {{}} do", f"include/{name}.lua", 1
    for line, file, number in body:
        if line not in (f"local {name} = {{}}", f"return {name}"):
            yield line, file, number
    yield "end", f"include/{name}.lua", len(source)


def _bind(keys: tuple[Slot, ...], args: tuple[Slot, ...]) -> Iterator[str]:
    for number, slot in enumerate(keys, start=1):
        if slot.is_rest:
            yield f"local {slot.name} = {{}}"
            yield f"for i = {number}, #KEYS do {slot.name}[i - {number - 1}] = KEYS[i] end"
        else:
            yield f"local {slot.name} = KEYS[{number}]"
    for number, slot in enumerate(args, start=1):
        match slot.type:
            case "str":
                yield f"local {slot.name} = ARGV[{number}]"
            case "map":
                yield f"local {slot.name} = pack.parse(ARGV[{number}])"
            case _:
                yield f"local {slot.name} = tonumber(ARGV[{number}])"
                may_be_empty = f'ARGV[{number}] ~= "" and ' if slot.type == "int?" else ""
                yield (
                    f"if {may_be_empty}(not {slot.name} or {slot.name} < 0 or {slot.name} % 1 ~= 0) then "
                    f'return redis.error_reply("GUARD_BAD_ARG {slot.name} must be a whole number field={slot.name}") end'
                )
