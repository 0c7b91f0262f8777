"""What an engine needs to know besides its store."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from guardd.canonical import state_digest
from guardd.model.limits import AGENT, REFERENCE, Policy
from guardd.model.tools import ToolRules


@dataclass(frozen=True)
class EngineConfig:
    """Rules and retention of an engine.

    policies:         by name; `reference` and `agent` are built in.
    default_policy:   of runs that name none.
    run_ttl_ms:       how long a run is kept after its last write.
    ledger_ttl_ms:    how long a finished effect is kept; must outlive the longest retry of any caller.
    trace_max:        entries of a tree's trace, about; 0: no trace.
    trace_originals:  keep arguments unredacted in the trace.
    calls_max:        answered call ids a tree remembers.
    holders_max:      holders a handoff path keeps.
    seen_max:         values that derived progress of kind `new` remembers.
    result_bytes_max: results up to this size are replayed as they were; larger ones by digest.
    virtual_clock:    take `at_ms` of a request as the time; for tests and the player.
    redact_key:       keys the digests that stand for secrets.
    """

    policies: Mapping[str, Policy] = field(default_factory=lambda: {p.name: p for p in (REFERENCE, AGENT)})
    default_policy: str = "agent"
    tools: ToolRules = field(default_factory=ToolRules)
    prefix: str = "guardd"
    run_ttl_ms: int = 7 * 86_400_000
    ledger_ttl_ms: int = 30 * 86_400_000
    trace_max: int = 1000
    trace_originals: bool = False
    calls_max: int = 256
    holders_max: int = 128
    seen_max: int = 1024
    result_bytes_max: int = 65_536
    virtual_clock: bool = False
    redact_key: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    def digest(self) -> str:
        """Digest of policies, tool rules and prefix: which configuration a daemon serves."""
        policies = [
            [name, policy.text(), sorted(policy.volatile_args)] for name, policy in sorted(self.policies.items())
        ]
        tools = [[name, repr(rule)] for name, rule in sorted(self.tools.by_name.items())]
        return state_digest([policies, tools, self.prefix, self.default_policy])

    def rules_digest(self) -> str:
        """Digest of everything that shapes fingerprints; daemons with another one judge calls differently."""
        shaping = [[name, sorted(policy.volatile_args)] for name, policy in sorted(self.policies.items())] + [
            [
                name,
                sorted(rule.aliases),
                sorted(rule.volatile_args),
                sorted(rule.keep_args),
                list(rule.target_args),
            ]
            for name, rule in sorted(self.tools.by_name.items())
        ]
        return state_digest(shaping)
