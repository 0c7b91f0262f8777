"""Ways in and who comes through them: from a token, or from the address, to a caller."""

from __future__ import annotations

from dataclasses import dataclass

from guardd.engine.tokens import Tokens
from guardd.model.errors import BadArgument, NotAllowed
from guardd.protocol.operations import Role
from guardd.server.gate import Caller, Gate
from guardd.server.settings import Settings


@dataclass(frozen=True, slots=True)
class Door:
    """One way in.

    name:        as the audit shows it.
    role:        of who brings no token; None: a token is needed.
    takes_token: False: everybody has `role`, whatever they bring.
    """

    name: str
    role: Role | None
    takes_token: bool = True


@dataclass(frozen=True, slots=True)
class Pass:
    """What somebody came in with. peer: what a client certificate says, or ""."""

    door: Door
    token_id: str = ""
    peer: str = ""


class NotKnown(NotAllowed):
    """The token is none, or none any more: the connection has nothing left to say."""


class Access:
    """Asks for tokens at every request, so that one that is taken away ends at once."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def enter(self, door: Door, token: object, *, peer: str = "") -> Pass:
        """Who greets, by what was brought.

        Raises: NotKnown: written down. StoreUnavailable: the tokens cannot be read. BadArgument: no text.
        """
        if token is None or not door.takes_token:
            if door.role is None:
                await self._gate.turned_away(door.name, "hello", "no token")
                raise NotKnown(
                    "this address takes tokens: set GUARDD_TOKEN or GUARDD_TOKEN_FILE; an operator makes one with: "
                    "guardd token new --role worker",
                    field="token", limit="a token",
                )  # fmt: skip
            return Pass(door, peer=peer)
        if not isinstance(token, str):
            raise BadArgument("a token is a text", field="token", value=type(token).__name__, limit="text")
        token_id = await self._gate.engine.tokens.check(token)
        if token_id is None:
            await self._gate.turned_away(door.name, "hello", "unknown token")
            raise _not_known()
        return Pass(door, token_id, peer)

    async def caller(self, entered: Pass, method: str) -> Caller:
        """Who asks now.

        Raises: NotKnown: the token was revoked or has expired; written down. StoreUnavailable.
        """
        if not entered.token_id:
            assert entered.door.role is not None
            return Caller(_named(entered.door.name, entered.peer), entered.door.role)
        found = await self._gate.engine.tokens.find(entered.token_id)
        if found is None:
            await self._gate.turned_away(f"token {entered.token_id}", method, "revoked or expired")
            raise _not_known()
        name = " ".join(filter(None, ("token", entered.token_id, found.name)))
        return Caller(_named(name, entered.peer), found.role, found.run_prefix)


def _named(name: str, peer: str) -> str:
    return f"{name} ({peer})" if peer else name


def _not_known() -> NotKnown:
    return NotKnown(
        "this token is unknown, revoked or expired: ask an operator for another: guardd token new",
        field="token", limit="a valid token",
    )  # fmt: skip


def roles_sentence(settings: Settings) -> str:
    """Who is who on these addresses, for the start line."""
    listen, operators = ", ".join(settings.listen), settings.operator_socket
    over_http = ""
    if settings.http_listen and settings.auth != "tokens":
        over_http = "; over HTTP on TCP everybody is worker, an operator brings a token"
    if settings.auth == "tokens":
        return "tokens: callers have the role of their token" + (
            f"; everybody on unix:{operators} is operator" if operators else ""
        )
    if operators:
        return f"no tokens: everybody on {listen} is worker, everybody on unix:{operators} is operator{over_http}"
    return f"no tokens: everybody on these addresses is operator{over_http}"


async def check_somebody_can_make_tokens(settings: Settings, tokens: Tokens) -> None:
    """With tokens asked for, somebody must be able to make the first one.

    Raises: BadArgument: there is neither an operator's socket nor an operator's token.
    """
    if settings.auth == "tokens" and not settings.operator_socket and not await tokens.has_operator():
        raise BadArgument(
            "auth = tokens, and nobody could make the first one: start with --operator-socket .guardd/operator.sock, "
            "then GUARDD_URL=unix:.guardd/operator.sock guardd token new --role operator",
            field="operator_socket", value=settings.operator_socket, limit="a path, or an operator's token in the store",
        )  # fmt: skip
