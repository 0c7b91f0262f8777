"""What a server must be, and what it promises: looked at when connecting (SPEC 5)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from guardd.model.errors import StoreRefused, StoreUnavailable

_MINIMUM = {"redis": (7, 0), "valkey": (7, 2)}
_CONFIGS = ("maxmemory", "maxmemory-policy", "appendonly", "appendfsync", "save")


@dataclass(frozen=True, slots=True)
class ServerReport:
    """What is known of a server. promise: what the configuration survives, in words. warnings: sentences."""

    server: str
    version: str
    promise: str
    warnings: tuple[str, ...]


async def check_server(execute: Callable[..., Awaitable[list[Any]]], *, durability: str) -> ServerReport:
    """Looks at version, role, eviction and persistence.

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
    if info.get("cluster_enabled") == "1":
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
    return ServerReport(server, version, _promise(config, info, durability, warnings), tuple(warnings))


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
