"""Equal values of a program, by value numbering: two values have one number if they are computed alike.

Equal equations of equal operands are, also inside of the bodies of `jit`s, in another order of commuted operands, as
another form of a square, or with zeros added; so is what a condition that always holds is joined with.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .. import compat
from ..annotations import annotate
from ..annotations.propagation_barrier import barrier_p
from ..annotations.same import same_p
from .equations import are_alike

KEPT = frozenset({"checkpoint", "optimization_barrier", "remat", "remat2"})
"""Primitives that exist to compute something once more."""

CALLS = frozenset({"call", "closed_call", "core_call", "jit", "pjit"})
"""Primitives that compute what their bodies do; others with bodies have derivatives of their own."""

COMMUTATIVE = frozenset({"add", "add_any", "and", "eq", "max", "min", "mul", "ne", "or", "xor"})
"""Primitives of which two operands may be swapped."""

ZEROS_OF_ZEROS = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "integer_pow", "reshape", "square"})
"""Primitives that make zeros of zeros; a power is at least one."""

SUMS = frozenset(
    "argmax argmin conv_general_dilated dot_general reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum "
    "reduce_xor".split()
)
"""Primitives whose results are reduced among devices where dims are sharded."""

SHARDINGS = frozenset({"out_sharding", "sharding"})
"""Parameters with the sharding of a result over axes that are Explicit."""

MAX_DEPTH = 8
"""Of nested `jit`s, the levels that are numbered as part of each level around them: all of them would take a time that
grows with the square of the depth."""


class ValueNumbers:
    """The numbers of values, in one program and its bodies."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._zeros: set[int] = set()
        self._trues: set[int] = set()
        self._neutral = {"add": self._zeros, "add_any": self._zeros, "and": self._trues, "or": self._zeros}
        """Op on two arrays -> the numbers of those that leave the other one as it is."""
        self._forms: dict[int, tuple[Any, int | None]] = {}
        """Id of an equation -> the equation, which keeps the id valid, and the number of its form."""
        self._depth = 0
        self.sums: set[int] = set()
        """The numbers of sums that equations and their bodies computed, for callers to clear."""

    def of_atom(self, atom: Any) -> int:
        """The number of an argument or a literal."""
        if not compat.is_literal(atom):
            return self._number(atom)
        if atom.aval.shape:
            return self._new_number()
        number = self._number((str(atom.aval), np.asarray(atom.val, atom.aval.dtype).tobytes()))
        is_truth = atom.aval.dtype == bool
        if (is_truth or jnp.issubdtype(atom.aval.dtype, jnp.number)) and atom.val == 0:
            self._zeros.add(number)
        elif is_truth:
            self._trues.add(number)
        return number

    def of_operand(self, atom: Any, numbers: Mapping[Any, int]) -> int:
        """The number of an operand, given those of the values of its program."""
        return numbers[atom] if not compat.is_literal(atom) and atom in numbers else self.of_atom(atom)

    def of_results(self, eqn: Any, operands: Sequence[int]) -> list[int]:
        """The numbers of an equation's results, given those of its operands."""
        if eqn.primitive.name in CALLS and not eqn.effects and compat.has_free_shardings(eqn):
            return self._of_body(eqn, operands)
        form = self._form(eqn)
        if form is None:
            return [self._new_number() for _ in eqn.outvars]
        name = eqn.primitive.name
        is_square = name == "square" or (name == "integer_pow" and eqn.params["y"] == 2)
        key: Hashable = (form, *operands)
        if is_square or (name == "mul" and operands[0] == operands[1]):
            key = ("square", str(eqn.outvars[0].aval), operands[0])
        elif name in COMMUTATIVE:
            key = (form, *sorted(operands))
        if name in self._neutral and (term := self._only_term(eqn, operands)) is not None:
            return [term]
        found = [self._number((key, i)) for i in range(len(eqn.outvars))]
        if name in SUMS:
            self.sums.update(found)
        if name in ZEROS_OF_ZEROS and operands[0] in self._zeros and eqn.params.get("y", 1) > 0:
            self._zeros.update(found)
        return found

    def _only_term(self, eqn: Any, operands: Sequence[int]) -> int | None:
        """The number of what zeros are added to, or of what is combined with true or false, if it stays as it is."""
        pairs, neutral = zip(eqn.invars, operands, strict=True), self._neutral[eqn.primitive.name]
        terms = [(atom, number) for atom, number in pairs if number not in neutral]
        is_same = len(terms) == 1 and are_alike(terms[0][0], eqn.outvars[0])
        return terms[0][1] if is_same else None

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _new_number(self) -> int:
        """The number of a value that is equal to no other, not even to that of the same equation in another call."""
        return self._number(object())

    def _of_body(self, eqn: Any, operands: Sequence[int]) -> list[int]:
        if self._depth == MAX_DEPTH:
            return [self._new_number() for _ in eqn.outvars]
        (_, _, body), *_ = compat.sub_jaxprs(eqn.params)
        jaxpr = compat.open_jaxpr(body)
        found = dict(zip(jaxpr.invars, operands, strict=True))
        found.update((v, self._number(id(const))) for v, const in zip(jaxpr.constvars, body.consts, strict=True))

        self._depth += 1
        for inner in jaxpr.eqns:
            operands = [self.of_operand(v, found) for v in inner.invars]
            found.update(zip(inner.outvars, self.of_results(inner, operands), strict=True))
        self._depth -= 1
        return [self.of_operand(v, found) for v in jaxpr.outvars]

    def _form(self, eqn: Any) -> int | None:
        """The number of what equal equations have in common beside their operands; None for those never merged."""
        if id(eqn) not in self._forms:
            key = _form(eqn)
            self._forms[id(eqn)] = (eqn, None if key is None else self._number(key))
        return self._forms[id(eqn)][1]


def _form(eqn: Any) -> Hashable | None:
    if eqn.effects or eqn.primitive.name in KEPT or eqn.primitive in (annotate.annotate_p, barrier_p, same_p):
        return None
    params = tuple((name, type(value), value) for name, value in map(_meaning, sorted(eqn.params.items())))
    key = (eqn.primitive, params, tuple(str(v.aval) for v in (*eqn.invars, *eqn.outvars)))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _meaning(param: tuple[str, Any]) -> tuple[str, Any]:
    """A parameter of an equation; a sharding over axes that are all Auto, which says nothing, as None."""
    name, value = param
    says_nothing = isinstance(value, NamedSharding) and value.mesh.are_all_axes_auto
    return (name, None) if says_nothing and name in SHARDINGS else param
