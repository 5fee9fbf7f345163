"""Sums that a call and something beside it compute alike, such as the mean in `jnp.std(x)` and `jnp.mean(x)`.

Equal values become one only where both are seen: such a call is inlined.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from .. import compat
from .constant_folding import GIVEN_OPERANDS
from .equal_values import SUMS, ValueNumbers
from .equations import inlined_call


class SharedSums:
    """Finds the calls to inline, in a program and its bodies."""

    def __init__(self, values: ValueNumbers) -> None:
        self.values = values
        self.known: dict[int, tuple[Any, bool]] = {}
        """Id of a body -> the body, which keeps the id valid, and whether it or a call in it computes a sum."""

    def inlined(self, eqns: Sequence[Any]) -> list[Any]:
        """The equations of a body, calls that share a sum with something else inlined."""
        found = [*eqns]
        while shared := self._sharing(found):
            new = [inner for eqn in found for inner in (inlined_call(eqn) if id(eqn) in shared else [eqn])]
            if len(new) == len(found) and all(a is b for a, b in zip(new, found, strict=True)):
                break
            found = new
        return found

    def _sharing(self, eqns: Sequence[Any]) -> set[int]:
        """The ids of the calls that compute a sum that another equation computes, too, unless they are equal."""
        if not any(map(self._is_call_with_sums, eqns)):
            return set()
        numbers: dict[Any, int] = {}
        made: set[int] = set()
        makers: defaultdict[int, list[Any]] = defaultdict(list)
        for eqn in eqns:
            self.values.sums.clear()
            results = self.values.of_results(eqn, [self.values.of_operand(v, numbers) for v in eqn.invars])
            if not made.issuperset(results):
                for number in self.values.sums:
                    makers[number].append(eqn)
            made.update(results)
            numbers.update(zip(eqn.outvars, results, strict=True))
        several = (eqn for found in makers.values() if len(found) > 1 for eqn in found)
        return {id(eqn) for eqn in several if self._is_call_with_sums(eqn)}

    def _is_call_with_sums(self, eqn: Any) -> bool:
        if eqn.primitive.name not in GIVEN_OPERANDS:
            return False
        (_, _, body), *_ = compat.sub_jaxprs(eqn.params)
        if id(body) not in self.known:
            inside = compat.open_jaxpr(body).eqns
            has_sums = any(one.primitive.name in SUMS or self._is_call_with_sums(one) for one in inside)
            self.known[id(body)] = (body, has_sums)
        return self.known[id(body)][1]
