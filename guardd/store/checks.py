"""What a server must be, and what it promises: looked at when connecting (SPEC 5)."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from guardd.model.errors import StoreRefused, StoreUnavailable

_MINIMUM = {"redis": (7, 0), "valkey": (7, 2)}
_CONFIGS = ("maxmemory", "maxmemory-policy", "appendonly", "appendfsync", "save", "min-replicas-to-write")
REPLICATED = (
    "no double grant in the tested partitions (3 nodes, colocated sentinels); Redis itself gives no proof of it: a "
    "grant or result is answered when half of the nodes have it in memory"
)


@dataclass(frozen=True, slots=True)
class ServerReport:
    """What is known of a server. promise: what the configuration survives, in words. warnings: sentences."""

    server: str
    version: str
    promise: str
    warnings: tuple[str, ...]


def merged(reports: dict[str, ServerReport]) -> ServerReport:
    """One report of several primaries: the first one's promise, the warnings of all."""
    first = next(iter(reports.values()))
    warned: dict[str, list[str]] = {}
    for name, report in reports.items():
        for warning in report.warnings:
            warned.setdefault(warning, []).append(name)
    warnings = tuple(f"{', '.join(names)}: {warning}" for warning, names in warned.items())
    return ServerReport(first.server, first.version, first.promise, warnings)


async def check_server(
    execute: Callable[..., Awaitable[list[Any]]], *, durability: str, kind: str = "standalone", replicas: int = 0
) -> ServerReport:
    """Looks at version, role, eviction, persistence and replicas.

    Args: kind: of the store. replicas: how many this primary should have.
    Raises: StoreRefused: with the sentence that mends it. StoreUnavailable.
    """
    (info_reply,) = await execute(("INFO", "everything"))
    info = _info(info_reply)
    config = await _config(execute)
    server = "valkey" if "valkey_version" in info or info.get("server_name") == "valkey" else "redis"
    version = info.get("valkey_version") or info.get("redis_version", "0")
    minimum = _MINIMUM[server]
    if tuple(int(part) for part in version.split(".")[:2]) < minimum:
        least = ".".join(str(part) for part in minimum)
        raise StoreRefused(
            f"{server} {version} is too old: install {server} {least} or newer",
            field="store",
            value=version,
            limit=least,
        )
    if info.get("role") not in (None, "master"):
        raise StoreRefused(
            f"this server is a replica of {info.get('master_host')}: name its primary in the store URL",
            field="store",
            value="replica",
        )
    if info.get("cluster_enabled") == "1" and kind != "cluster":
        raise StoreRefused("this server is a cluster node: use a redis+cluster:// URL", field="store", value="cluster")
    warnings: list[str] = []
    policy = config.get("maxmemory-policy") or info.get("maxmemory_policy", "")
    maxmemory = int(config.get("maxmemory") or info.get("maxmemory") or 0)
    if policy != "noeviction" and maxmemory > 0:
        raise StoreRefused(
            f"this server may evict keys ({policy}), and an evicted record lets an effect run twice: "
            "CONFIG SET maxmemory-policy noeviction, and in its configuration file",
            field="maxmemory-policy", value=policy, limit="noeviction",
        )  # fmt: skip
    if policy != "noeviction":
        warnings.append(f"maxmemory-policy is {policy}: with a maxmemory set it would evict; set it to noeviction")
    if int(info.get("evicted_keys", 0)) > 0:
        warnings.append(
            f"this server has evicted {info['evicted_keys']} keys since its start: some records may be gone"
        )
    _check_replicas(config, info, kind, durability, replicas, warnings)
    promise = _promise(config, info, durability, warnings)
    return ServerReport(server, version, REPLICATED if durability == "replicated" else promise, tuple(warnings))


def _check_replicas(
    config: dict[str, str], info: dict[str, str], kind: str, durability: str, replicas: int, warnings: list[str]
) -> None:
    in_sync = sum(1 for name, value in info.items() if re.fullmatch(r"slave\d+", name) and "state=online" in value)
    needed = (replicas + 1) // 2
    if durability == "replicated" and in_sync < needed:
        raise StoreRefused(
            f"{in_sync} of {replicas} replicas are in sync, durability replicated needs {needed}: bring them back",
            field="durability", value=in_sync, limit=needed,
        )  # fmt: skip
    if kind not in ("sentinel", "cluster"):
        return
    if in_sync < max(1, replicas):
        warnings.append(
            f"{in_sync} of {replicas} replicas are in sync: after a failover now, grants and results may be lost; bring them back"
        )
    if durability != "replicated":
        warnings.append(
            "a failover may lose what was acknowledged just before it, and a primary that is cut off goes on granting; "
            "set durability replicated"
        )
    if int(config.get("min-replicas-to-write") or 0) < 1:
        warnings.append(
            "min-replicas-to-write is 0: a primary that is cut off goes on taking writes (CONFIG SET min-replicas-to-write 1, "
            "min-replicas-max-lag 2, and in its configuration file)"
        )


def _promise(config: dict[str, str], info: dict[str, str], durability: str, warnings: list[str]) -> str:
    appendonly = config.get("appendonly") or ("yes" if info.get("aof_enabled") == "1" else "no")
    fsync = config.get("appendfsync", "unknown")
    if durability == "fsync" and (appendonly != "yes" or fsync != "always"):
        raise StoreRefused(
            f"durability fsync needs appendonly yes and appendfsync always, this server has {appendonly} and {fsync}: "
            "CONFIG SET appendonly yes, CONFIG SET appendfsync always, and in its configuration file",
            field="appendfsync", value=fsync, limit="always",
        )  # fmt: skip
    if appendonly == "yes" and fsync == "always":
        return "an acknowledged grant or result survives kill -9 and power loss of this machine, as far as the disk honours fsync"
    if appendonly == "yes" and fsync == "everysec":
        return "survives process crashes on a healthy disk; up to about 1 s (more on a slow disk) is lost at power loss"
    if appendonly != "yes":
        warnings.append(
            "persistence by append-only file is off: a restart of the server loses runs and effects (CONFIG SET appendonly yes)"
        )
        return "nothing survives a restart of the server but what its last snapshot holds"
    return f"appendfsync is {fsync}: what a power loss takes is up to the operating system"


async def _config(execute: Callable[..., Awaitable[list[Any]]]) -> dict[str, str]:
    """CONFIG values, {} where the server does not let us read them (managed services)."""
    try:
        replies = await execute(*(("CONFIG", "GET", name) for name in _CONFIGS))
    except StoreUnavailable:
        return {}
    return {_text(reply[0]): _text(reply[1]) for reply in replies if reply}


def _info(reply: Any) -> dict[str, str]:
    lines = _text(reply).splitlines()
    if not lines:
        raise StoreUnavailable("the server answered INFO with nothing; is it a Redis or Valkey?", field="store")
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
