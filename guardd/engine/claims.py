"""Claims outside the one script of a call: global keys, and taking back what was granted too early (SPEC 2.6, 5)."""

from __future__ import annotations

from guardd.engine.context import Context
from guardd.engine.shaping import Effect, pairs, text
from guardd.keys import Key
from guardd.model.limits import Policy
from guardd.protocol import operations as ops
from guardd.scripts import stubs
from guardd.scripts.bind import Invocation
from guardd.store.base import Unproved
from guardd.store.errors import map_error


class Claims:
    """A global key takes three scripts: look at its record, `before` with what was seen, claim."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def key(self, run: str, effect: Effect | None) -> Key | None:
        """The record of an effect, None without one."""
        return None if effect is None else self.key_of(run, effect.digest, effect.scope)

    def key_of(self, run: str, digest: str, scope: str) -> Key:
        """The record of this digest."""
        keys = self.context.keys
        return keys.global_op(digest) if scope == "global" else keys.op(run, digest)

    async def look(self, effect: Effect, at_ms: int | None, wait_ms: int) -> dict[str, str]:
        """What a global record says now (SPEC 2.6, first of three scripts)."""
        reply = await self.context.link.invoke(
            stubs.look(
                op_key=self.context.keys.global_op(effect.digest),
                now_ms=at_ms,
                wait_ms=wait_ms or None,
                channel=self.context.keys.events,
            )
        )
        return {"state": text(reply[0]), **pairs(reply[2:])}

    async def claim(
        self,
        effect: Effect,
        request: ops.Before,
        tool: str,
        fingerprint: str,
        policy: Policy,
        *,
        may_reclaim: bool,
        is_fresh: bool,
    ) -> bool:
        """Claims a global key for an admitted call; on a loss the admission is withdrawn (SPEC 2.6).

        is_fresh: the grant was not answered before, so it may be taken back when the claim is not proved.
        """
        invocation = stubs.claim(
            op_key=self.context.keys.global_op(effect.digest),
            now_ms=request.at_ms,
            lease_ms=int(policy.limits["claim_lease_ms"] or 0),
            owner=request.call,
            fp=fingerprint,
            run=request.run,
            agent=request.agent,
            tool=tool,
            key=effect.key,
            reclaim="1" if may_reclaim else "",
        )
        try:
            reply = await self.context.link.invoke(invocation)
        except Unproved:
            if is_fresh:
                await self._withdraw(request, effect)
            raise
        if text(reply[0]) == "won":
            return True
        await self._withdraw(request, None)
        return False

    async def take_back(self, request: ops.Before, effect: Effect | None, unproved: Unproved) -> None:
        """Withdraws what was granted by a script whose write does not stand firm enough (SPEC 5)."""
        if not unproved.replies or isinstance(unproved.replies[-1], Exception):
            return
        action, _, extras, _ = self.context.reply(unproved.replies[-1])
        if action == "execute" and "asked" not in extras:
            await self._withdraw(request, effect)

    async def _withdraw(self, request: ops.Before, effect: Effect | None) -> None:
        """Takes an admission back, and the claim of `effect`, whichever scope it has.

        Where the store cannot do it now the claim stays and is in doubt at the end of its lease.
        """
        now_ms, settings, channel = request.at_ms, self.context.settings, self.context.keys.events
        if effect is not None and effect.scope == "global":
            key = self.context.keys.global_op(effect.digest)
            release = stubs.release(op_key=key, now_ms=now_ms, settings=settings, owner=request.call, channel=channel)
            await self._whatever_stands(release)
        own_op = effect is not None and effect.scope == "run"
        await self._whatever_stands(
            stubs.withdraw(
                calls_key=self.context.keys.calls(request.run),
                trace_key=self.context.keys.trace(request.run),
                marks_key=self.context.keys.marks(request.run),
                op_key=self.context.keys.op(request.run, effect.digest)
                if effect and own_op
                else self.context.keys.no_op(request.run),
                run_keys=self.context.keys.chain(request.run),
                now_ms=now_ms,
                settings=settings,
                channel=channel,
                run=request.run,
                call=request.call,
                asked=1,
            )
        )

    async def _whatever_stands(self, invocation: Invocation) -> None:
        """Sends a withdrawal; that its own write is not proved changes nothing: a claim that stays is in doubt later."""
        try:
            await self.context.link.invoke(invocation)
        except Unproved as unproved:
            if isinstance(unproved.replies[-1], Exception):
                raise map_error(unproved.replies[-1], where="a withdrawal") from unproved
