"""Op priorities: the directions in which each kind of op propagates at each of the five levels.

After Shardy (openxla/shardy, `docs/propagation.md`): pass-through ops first, ops that contract or reduce last.
"""

from __future__ import annotations

from ..rules import Flow, Kind, Rule

NONE, FORWARD, BACKWARD, BOTH = 0, 1, 2, 3
LEVELS = 5
"""Op priorities, from pass-through ops to all."""


def factor_directions(rule: Rule, single_use: bool, level: int) -> tuple[int, ...]:
    """Returns the directions in which each factor of a rule propagates at a level."""
    passing, other = _kind_directions(rule.flow, single_use, level)
    found = [passing if kind is Kind.PASS else other for kind in rule.kinds]
    for factor in rule.blocked:
        found[factor] = NONE
    return tuple(found)


def _kind_directions(flow: Flow, single_use: bool, level: int) -> tuple[int, int]:
    """Returns the directions at a level of pass-through factors, and of all others."""
    if flow is Flow.FORWARD or flow is Flow.BACKWARD:
        return (FORWARD, FORWARD) if flow is Flow.FORWARD else (BACKWARD, BACKWARD)
    if level == 4:
        return BOTH, BOTH
    backward_only = BACKWARD if flow is Flow.BROADCAST else BOTH
    if level == 3:
        return backward_only, backward_only
    early = NONE
    if level >= 1 or single_use:
        early = BOTH if flow in (Flow.ELEMENTWISE, Flow.MOVE) else FORWARD if flow is Flow.SLICE else NONE
    return (early | backward_only if level == 2 else early), early
