"""How an op is cut over the mesh: what it needs its operands to be split like, and what it leaves to be added up.

The splits of a completed program are those of values. Where those of an op's operands and results don't fit one
another, data moves before the op or after it. The choice is that of XLA's partitioner: an op is computed as its
result is split; a factor that is summed over keeps the split that all operands with it have, even if the result is
split by the same axes, and what one operand alone is split by goes to the others or is gathered. A concatenation is
split along another dim while it runs. A gather is split as the array that it looks up in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..graph import Op
from ..propagation.atoms import Atoms, AtomTable
from ..propagation.growth import project
from ..propagation.network import Form
from ..propagation.splits import Split
from ..rules import Kind, Rule

Cut = tuple[Atoms, ...]
"""Per dim of an array the atoms of mesh axes that split it."""


@dataclass(frozen=True, slots=True)
class Partition:
    """How one op is computed."""

    operands: tuple[Cut, ...]
    results: tuple[Cut, ...]
    summed: Atoms
    """The atoms over which results are partial sums."""


class Partitions:
    """The partitions of ops, worked out once for ops that are alike and meet alike."""

    def __init__(self, table: AtomTable):
        self._table = table
        self._forms: dict[Rule, Form] = {}
        self._found: dict[object, Partition] = {}

    def of(self, op: Op, operands: Sequence[Cut], results: Sequence[Cut]) -> Partition:
        """How an op is computed whose arrays are split so."""
        if op.rule is None:
            return Partition(tuple(whole(c) for c in operands), tuple(whole(c) for c in results), ())
        key = (op.name, op.rule, tuple(operands), tuple(results))
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._partition(op.name, op.rule, operands, results)
        return found

    def _partition(self, name: str, rule: Rule, operands: Sequence[Cut], results: Sequence[Cut]) -> Partition:
        form = self._forms.setdefault(rule, Form.of(0, rule, single_use=False, firsts=None))
        cuts = [*operands, *results]
        parts = [
            project(form, a, Split(cut, (False,) * len(cut)), self._table.sizes).factors for a, cut in enumerate(cuts)
        ]
        n = len(operands)
        factors: dict[int, Atoms] = {}
        moved: Atoms = ()
        for part in parts[n:]:
            for f, atoms in part.items():
                kept = rule.kinds[f] is not Kind.REPLICATE
                moved += () if kept else tuple(a for a in atoms if a not in moved)
                factors.setdefault(f, atoms if kept else ())
        if name == "concatenate":
            self._move(moved, rule, factors)
        if name == "gather":
            self._keep(parts[0], rule, factors)
        summed: list[int] = []
        for f, kind in enumerate(rule.kinds):
            if f in factors:
                continue
            have = [part[f] for part in parts[:n] if f in part]
            atoms = self._agreed(have, factors) if kind in (Kind.REDUCE, Kind.PASS) else ()
            if {*atoms} & self._promised(name, parts, factors):
                atoms = ()
            factors[f] = atoms
            if kind is Kind.REDUCE:
                summed += atoms
            for g in factors:
                if g != f and atoms:
                    factors[g] = tuple(a for a in factors[g] if a not in atoms)
        arrays = []
        for dims, part in zip(form.arrays, parts, strict=True):
            own = {
                f: part.get(f, ()) if kind is Kind.PERMUTE else factors.get(f, ()) for f, kind in enumerate(rule.kinds)
            }
            arrays.append(tuple(tuple(a for f in dim for a in own[f]) for dim in dims))
        return Partition(tuple(arrays[:n]), tuple(arrays[n:]), tuple(summed))

    def _promised(self, name: str, parts: Sequence[dict[int, Atoms]], factors: dict[int, Atoms]) -> set[int]:
        """The atoms that split the result in ways that a sum over the same devices gives way to."""
        if name == "gather":
            return {a for atoms in factors.values() for a in atoms}
        if name.startswith("scatter"):  # along the dims that updates have too
            return {a for f, atoms in factors.items() if f in parts[2] for a in atoms}
        return set()

    def _keep(self, operand: dict[int, Atoms], rule: Rule, factors: dict[int, Atoms]) -> None:
        """Splits a gather as the array that is looked up in, along dims that are taken as a whole."""
        for f, atoms in operand.items():
            if rule.kinds[f] is Kind.PASS and f in factors and not factors[f] and atoms:
                for g in factors:
                    factors[g] = tuple(a for a in factors[g] if a not in atoms)
                factors[f] = atoms

    def _move(self, atoms: Atoms, rule: Rule, factors: dict[int, Atoms]) -> None:
        """Splits the first other factor that they divide by atoms that can't stay."""
        sizes = self._table.sizes
        for f, have in factors.items():
            whole = math.prod(sizes[a] for a in (*have, *atoms))
            if rule.kinds[f] is Kind.PASS and rule.sizes[f] % whole == 0:
                factors[f] = (*have, *atoms)
                return

    def _agreed(self, have: Sequence[Atoms], factors: dict[int, Atoms]) -> Atoms:
        """The split of a factor that results lack: what all arrays agree on, or what is free to be taken."""
        if not have:
            return ()
        if all(atoms == have[0] for atoms in have):
            return have[0]
        taken = {a for atoms in factors.values() for a in atoms}
        longest = max(have, key=len)
        return () if taken & {*longest} else longest


def whole(cut: Cut) -> Cut:
    """No split."""
    return ((),) * len(cut)
