"""Random games (tests/reference/moves.py): the guard against the reference, answer by answer.

More games: GUARDD_GAMES=2000. `shortened` cuts a game that fails down to what it needs.
"""

from __future__ import annotations

import os
from typing import Any

from guardd.engine.config import EngineConfig
from guardd.engine.core import Engine
from guardd.model.errors import GuardError
from guardd.model.limits import AGENT, REFERENCE, Policy
from guardd.model.tools import ToolRules
from guardd.store.connect import OpenedStore
from tests.reference.compare import Answer, compare
from tests.reference.model import ReferenceGuard
from tests.reference.moves import TOOLS, Game, seeded_game

GAMES = int(os.environ.get("GUARDD_GAMES", "80"))
POLICIES = {policy.name: policy for policy in (REFERENCE, AGENT)}


class Answering:
    """An engine whose errors are answers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def call(self, op: str, params: dict[str, Any]) -> Answer:
        try:
            return (await self.engine.call(op, params)).as_dict()  # type: ignore[union-attr]
        except GuardError as error:
            return error.as_dict()


async def differences(opened: OpenedStore, prefix: str, game: Game) -> list[str]:
    """What the engine answers differently from the reference in one game."""
    base = POLICIES[game.policy]
    policy = Policy(base.name, {**base.limits, **game.limits}, base.volatile_args, base.read_only_defaults)
    config = EngineConfig(
        policies={base.name: policy},
        default_policy=base.name,
        tools=ToolRules(TOOLS),
        prefix=prefix,
        virtual_clock=True,
    )
    reference = ReferenceGuard(game.limits, TOOLS, policy=game.policy)
    return await compare(Answering(Engine(opened.store, config)), reference, game.ops)


async def test_the_guard_answers_random_games_as_the_reference_does(opened: OpenedStore, prefix: str) -> None:
    """Every answer of every game is equal: action, reason, retry time, stale claims and errors."""
    for seed in range(GAMES):
        found = await differences(opened, f"{prefix}-{seed}", seeded_game(seed))
        assert not found, f"game {seed}: {found[0]}"
