"""Every setting of the daemon, declared once: file, environment, flags, help and documentation come from here."""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from dataclasses import field as declared
from pathlib import Path
from typing import Any

from guardd.engine.config import EngineConfig
from guardd.model.errors import BadArgument
from guardd.model.limits import AGENT, REFERENCE, Policy, check_limits
from guardd.model.tools import ToolRules

BUILT_IN = {policy.name: policy for policy in (REFERENCE, AGENT)}


def setting(
    default: Any, help_text: str, *, unit: str = "", least: int = 0, most: int = 2**53 - 1, words: tuple[str, ...] = ()
) -> Any:
    """One setting: default, help, unit and range, or the words it may be."""
    metadata = {"help": help_text, "unit": unit, "least": least, "most": most, "words": words}
    if isinstance(default, list):
        return declared(default_factory=lambda: list(default), metadata=metadata)
    return declared(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """What `guardd serve` takes: from guardd.toml, GUARDD_* variables and flags, the later ones win."""

    listen: list[str] = setting(
        ["unix:.guardd/guardd.sock"], "where clients connect, may be given again", unit="ADDRESS"
    )
    http_listen: list[str] = setting([], "where HTTP is served, may be given again; none: no HTTP", unit="ADDRESS")
    auth: str = setting(
        "none",
        "none or tokens: whether callers on `listen` and `http_listen` need a token",
        unit="WORD",
        words=("none", "tokens"),
    )
    operator_socket: str = setting("", "a 0600 Unix socket on which everybody is operator; empty: none", unit="PATH")
    tls_cert: str = setting("", "certificate chain, PEM; TCP listeners then speak TLS", unit="FILE")
    tls_key: str = setting("", "private key of tls_cert, PEM", unit="FILE")
    tls_client_ca: str = setting("", "ask clients for a certificate of this authority, PEM", unit="FILE")
    store: str = setting("embedded:", "where the state lives; see docs/store.md", unit="URL")
    state_dir: str = setting(".guardd", "files of the daemon and of an embedded store", unit="DIR")
    durability: str = setting("", "memory, fsync or replicated; empty: fsync when embedded, else memory", unit="WORD")
    prefix: str = setting("guardd", "of every key", unit="WORD")
    default_policy: str = setting("agent", "of runs that name none", unit="NAME")
    store_timeout_ms: int = setting(2000, "after this a store command counts as unanswered", unit="MS", least=10)
    drain_timeout_ms: int = setting(10_000, "how long a stopping daemon answers what is in flight", unit="MS")
    workers: int = setting(1, "processes that serve the same addresses", unit="COUNT", least=1, most=64)
    connections_max: int = setting(10_000, "more are closed at once", unit="COUNT", least=1)
    frame_bytes_max: int = setting(
        1_048_576, "a longer frame closes its connection", unit="BYTES", least=1024, most=1_048_576
    )
    run_ttl_ms: int = setting(7 * 86_400_000, "how long a run is kept after its last write", unit="MS", least=1000)
    ledger_ttl_ms: int = setting(30 * 86_400_000, "how long a finished effect is kept", unit="MS", least=1000)
    trace_max: int = setting(1000, "entries of a tree's trace, about; 0: no trace", unit="COUNT")
    trace_originals: bool = setting(False, "keep arguments unredacted in the trace")
    virtual_clock: bool = setting(False, "take at_ms of a request as the time; for tests and the player")
    otel: bool = setting(False, "send OpenTelemetry spans, as the OTEL_* variables say; needs guardd[otel]")
    policies: Mapping[str, Any] = declared(default_factory=dict, metadata={"help": ""})
    tools: Mapping[str, Any] = declared(default_factory=dict, metadata={"help": ""})
    hooks: Mapping[str, Any] = declared(default_factory=dict, metadata={"help": ""})

    def engine_config(self, redact_key: bytes) -> EngineConfig:
        """The part that the engine needs.

        Raises: BadArgument: a policy or tool rule is malformed.
        """
        policies = dict(BUILT_IN)
        for name, given in self.policies.items():
            policies[name] = _policy(name, given)
        if self.default_policy not in policies:
            raise BadArgument(
                "no such policy", field="default_policy", value=self.default_policy, limit=", ".join(policies)
            )
        shared = {
            name: getattr(self, name)
            for name in (
                "prefix",
                "run_ttl_ms",
                "ledger_ttl_ms",
                "trace_max",
                "trace_originals",
                "virtual_clock",
                "default_policy",
            )
        }
        return EngineConfig(policies=policies, tools=ToolRules(self.tools), redact_key=redact_key, **shared)


def _policy(name: str, given: Any) -> Policy:
    if not isinstance(given, dict):
        raise BadArgument("a policy is a table", field=f"policies.{name}", value=given, limit="table")
    rest = dict(given)
    base = BUILT_IN.get(rest.pop("base", name), AGENT)
    volatile = rest.pop("volatile_args", None)
    limits = {key: (None if value == "unlimited" else value) for key, value in rest.items()}
    return Policy(
        name,
        {**base.limits, **check_limits(limits, field_name=f"policies.{name}")},
        base.volatile_args if volatile is None else frozenset(volatile),
        base.read_only_defaults,
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every setting, with its unit, default and variable."""
    for each in fields(Settings):
        if not each.metadata["help"]:
            continue
        flag = "--" + each.name.replace("_", "-")
        default = getattr(Settings(), each.name)
        help_text = f"{each.metadata['help']} (default {default!r}, env GUARDD_{each.name.upper()})".replace("%", "%%")
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_const", const=True, help=help_text)
        elif isinstance(default, list):
            parser.add_argument(flag, action="append", metavar=each.metadata["unit"], help=help_text)
        else:
            parser.add_argument(flag, metavar=each.metadata["unit"], help=help_text)
    parser.add_argument(
        "--config", metavar="FILE", help="settings, policies and tool rules (default guardd.toml when it is there)"
    )


def load_settings(arguments: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Settings:
    """Settings from file, environment and flags.

    Raises: BadArgument: names the source, the setting, its value and what is allowed.
    """
    environment = os.environ if environment is None else environment
    path = Path(arguments.get("config") or environment.get("GUARDD_CONFIG") or "guardd.toml")
    values: dict[str, tuple[Any, str]] = {}
    if arguments.get("config") or environment.get("GUARDD_CONFIG") or path.exists():
        values = {name: (value, str(path)) for name, value in _read(path).items()}
    known = {each.name: each for each in fields(Settings)}
    for name in known:
        if (text := environment.get(f"GUARDD_{name.upper()}")) is not None:
            values[name] = (text, f"GUARDD_{name.upper()}")
        if arguments.get(name) is not None:
            values[name] = (arguments[name], "--" + name.replace("_", "-"))
    checked = {}
    for name, (value, source) in values.items():
        if name not in known:
            raise BadArgument(f"{source}: no such setting", field=name, value=value, limit=", ".join(known))
        checked[name] = _checked(known[name], value, source)
    return Settings(**checked)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        found: dict[str, Any] = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        return found
    except (OSError, ValueError) as error:
        raise BadArgument(
            f"the settings file cannot be read: {error}",
            field="config",
            value=str(path),
            limit="TOML, or JSON in a file of that name",
        ) from error


def _checked(each: Any, value: Any, source: str) -> Any:
    default = getattr(Settings(), each.name)
    bad = BadArgument(
        f"{source} has a value of another kind", field=each.name, value=value, limit=type(default).__name__
    )
    if isinstance(default, bool):
        if isinstance(value, str):
            value = {"1": True, "true": True, "0": False, "false": False}.get(value.lower())
        if not isinstance(value, bool):
            raise bad
    elif isinstance(default, int):
        if isinstance(value, bool) or not str(value).lstrip("-").isdigit():
            raise bad
        value = int(value)
        if not each.metadata["least"] <= value <= each.metadata["most"]:
            limit = f"{each.metadata['least']}..{each.metadata['most']} {each.metadata['unit']}"
            raise BadArgument(f"{source} is out of range", field=each.name, value=value, limit=limit)
    elif isinstance(default, list):
        value = value.split(",") if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise bad
    elif not isinstance(value, type(default)):
        raise bad
    if (words := each.metadata.get("words")) and value not in words:
        raise BadArgument(f"{source} is another word", field=each.name, value=value, limit=" | ".join(words))
    return value
