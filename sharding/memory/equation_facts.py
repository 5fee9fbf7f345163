"""What lowering needs to know of an equation, however its arrays are sharded: found once per program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import compat
from ..graph import Graph, Op, Scope
from ..rewrite.rotation import Rotation, rotations
from ..spec import Spec, closed_spec
from . import primitive_traits
from .instruction import Instruction, Phase


class EquationKey:
    """What equal equations share besides their operands: one object for all of them."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Array:
    """An operand or a result."""

    variable: Any
    """None for a literal operand, or a result that nothing reads."""
    value: int | None
    """The graph's number of it; None if the graph doesn't have it."""
    shape: tuple[int, ...]
    """Global."""
    itemsize: float
    replicated: Spec
    """Its spec where the graph doesn't have it."""
    is_stored: bool
    """Whether it is stored in memory if it is a constant operand."""

    def spec(self, specs: Sequence[Spec]) -> Spec:
        """Its spec, given one per value."""
        return self.replicated if self.value is None else specs[self.value]


@dataclass(frozen=True, slots=True, eq=False)
class EquationFacts:
    """One equation of a scope."""

    eqn: Any
    name: str
    """Of its primitive."""
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    op: Op | None
    """The graph's op of it, if both have the same operands and results."""
    rotation: Rotation | None
    """Which its result is."""
    is_constant: bool
    """Whether the results are constants if all operands are, which each user recomputes."""
    key: EquationKey | None
    """None where it can't be decided which equations are equal."""
    stack: str
    """Its name stack."""

    def phase(self, outer: Phase) -> Phase:
        """The pass of a gradient that it belongs to, by the transformations in its name stack."""
        if outer == "backward" or "transpose(" in self.stack:
            return "backward"
        return "forward" if "jvp(" in self.stack else outer

    def key_with(self, operands: Sequence[Instruction | None]) -> EquationKey | None:
        """Its key, unless an operand is a constant that is no literal."""
        if None not in operands:
            return self.key
        is_known = all(x is not None or a.variable is None for x, a in zip(operands, self.operands, strict=True))
        return self.key if is_known else None


class KnownEquations:
    """The equations of a program that were lowered before."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._facts: dict[tuple[Scope | None, int], EquationFacts] = {}
        self._keys: dict[tuple, EquationKey] = {}

    @classmethod
    def of(cls, graph: Graph) -> KnownEquations:
        """Those of a program, for all of its shardings."""
        return graph.once("equations", lambda: cls(graph))

    def facts(self, i: int, eqn: Any, scope: Scope | None) -> EquationFacts:
        """What is known of an equation, by its index in a scope; manual code may have none."""
        key = (scope, i) if scope is not None else (None, id(eqn))
        found = self._facts.get(key)
        if found is None or found.eqn is not eqn:
            found = self._facts[key] = self._find(i, eqn, scope)
        return found

    def _find(self, i: int, eqn: Any, scope: Scope | None) -> EquationFacts:
        name = eqn.primitive.name
        operands = tuple(_array(a, _value(a, scope), name) for a in eqn.invars)
        results = tuple(_array(v, _value(v, scope), name) for v in eqn.outvars)
        made = [a for a in results if a.variable is not None]
        value = results[0].value if len(results) == 1 and made else None
        return EquationFacts(
            eqn=eqn,
            name=name,
            operands=operands,
            results=results,
            op=self._op(i, eqn, scope, made),
            rotation=None if value is None else rotations(self.graph).get(value),
            is_constant=primitive_traits.is_fusible(name) if scope is None else all(a.value is None for a in made),
            key=self._key(eqn),
            stack=compat.name_stack(eqn),
        )

    def _op(self, i: int, eqn: Any, scope: Scope | None, made: Sequence[Array]) -> Op | None:
        if scope is not None and i in scope.opaque:
            return scope.opaque[i]
        value = next((a.value for a in made if a.value is not None), None)
        op = None if value is None else self.graph.makers.get(value)
        has_all = op is not None and len(op.operands) == len(eqn.invars) and len(op.results) == len(eqn.outvars)
        return op if op is not None and has_all and op.site and op.site[0] is eqn else None

    def _key(self, eqn: Any) -> EquationKey | None:
        literals = tuple(str(a.val) if compat.is_literal(a) else None for a in eqn.invars)
        params = tuple(v for p, v in eqn.params.items() if p not in ("sharding", "out_sharding"))
        try:
            return self._keys.setdefault((params, literals), EquationKey())
        except TypeError:  # not hashable
            return None


def _value(var: Any, scope: Scope | None) -> int | None:
    return None if scope is None or compat.is_literal(var) else scope.env.get(var)


def _array(atom: Any, value: int | None, name: str) -> Array:
    is_absent, shape = compat.is_literal(atom) or compat.is_drop(atom), atom.aval.shape
    return Array(
        variable=None if is_absent else atom,
        value=value,
        shape=shape,
        itemsize=itemsize(atom.aval),
        replicated=closed_spec(len(shape)),
        is_stored=primitive_traits.stores_constant(name, shape),
    )


def itemsize(aval: Any) -> float:
    """Bytes per element on the device, those of a PRNG key included; an array of the host has none."""
    return 0 if compat.is_on_host(aval) else primitive_traits.element_bytes(aval.dtype)
