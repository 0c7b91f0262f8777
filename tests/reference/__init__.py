"""The rules of the guard said a second time, as plainly as Python allows.

The tests own this model: it shares no line with the guard, so that a mistake in
one of them shows as a difference. Nothing here is fast, bounded or concurrent.

    policy.py      the numbers of SPEC 2.10 and the tool rules
    canonical.py   arguments -> one text (SPEC 2.1)
    state.py       what is remembered; the tree of runs, ends, pauses, wall time
    progress.py    windows, streaks, versions, rounds (SPEC 2.2 step 10, 2.4)
    ledger.py      effects and who may run them (SPEC 2.6)
    before.py      the eleven steps before a call, and call ids (SPEC 2.2)
    after.py       results (SPEC 2.3)
    operations.py  money and handoffs (SPEC 2.7, `charge`, `settle`)
    model.py       ReferenceGuard: the operator's operations (SPEC 2.8) and the way in

    pair.py        one guard beside one model, for tests that move both
    player.py      plays a scenario file
    moves.py       random operations
    compare.py     plays operations on a guard and on this model, and tells the differences
"""
