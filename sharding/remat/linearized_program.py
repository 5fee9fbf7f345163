"""A function as `jax.checkpoint` sees it: the ops that its backward pass may run again, and what it needs of them.

Ops come from the jvp of the function. Those that depend on tangents are the linear part, which the backward transposes;
of the others, it needs the values that the linear part reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from .. import compat
from ..cost import work
from ..cost.bytes_accessed import num_bytes
from ..graph.inlined_calls import CALLS

LOOPS = frozenset({"cond", "scan", "while"})
"""Their results always run again: a policy decides on the ops in their bodies."""
Key = tuple[Any, ...]
"""What a policy sees of an op; ops with one key are all saved or none."""


def key_of(primitive: Any, avals: Sequence[Any], params: dict[str, Any]) -> Key:
    """The key of an op: the name given by `checkpoint_name`, or its primitive, operand types and parameters."""
    if primitive.name == "name":
        return ("name", params["name"])
    types = tuple((tuple(getattr(a, "shape", ())), str(getattr(a, "dtype", ""))) for a in avals)
    return primitive.name, types, tuple(sorted((name, _text(value)) for name, value in params.items()))


def _text(value: Any) -> str:
    """A parameter as text that is equal in each trace."""
    if compat.is_jaxpr(value) or callable(value):
        return type(value).__name__
    return re.sub(r"0x[0-9a-f]+", "", str(value))


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """An op that does not depend on tangents."""

    key: Key
    operands: tuple[int, ...]
    results: tuple[int, ...]
    flops: float
    source: str
    is_saveable: bool


@dataclass(slots=True, eq=False)
class Program:
    """Ops in order. Arguments and constants are not among the values: they are at hand anyway."""

    ops: list[Op] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    """Of each value."""
    needed: set[int] = field(default_factory=set)
    """The values that the linear part reads."""
    forward: set[int] = field(default_factory=set)
    """The ops that the function's results need; the others compute factors of the derivative only."""

    def makers(self) -> dict[int, int]:
        """Value -> op."""
        return {value: number for number, op in enumerate(self.ops) for value in op.results}


def linearized(fun: Callable[..., Any], *args: Any) -> Program:
    """The program of the derivative of `fun` by all floats among its arguments."""
    leaves, tree = jax.tree.flatten(args)
    closed = jax.make_jaxpr(lambda *leaves: jax.tree.leaves(fun(*jax.tree.unflatten(tree, leaves))))(*leaves)
    run = compat.jaxpr_fun(closed)
    is_float = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]
    floats = [leaf for leaf, is_one in zip(leaves, is_float, strict=True) if is_one]

    def jvp(leaves: list[Any], tangents: list[Any]) -> Any:
        def of_floats(*floats: Any) -> list[Any]:
            rest = iter(floats)
            return run(*(next(rest) if is_one else leaf for is_one, leaf in zip(is_float, leaves, strict=True)))

        return jax.jvp(of_floats, [x for x, is_one in zip(leaves, is_float, strict=True) if is_one], tangents)

    traced = compat.open_jaxpr(jax.make_jaxpr(jvp)(leaves, floats))
    reader = _Reader()
    env = dict.fromkeys((*traced.invars[: len(leaves)], *traced.constvars))
    env |= dict.fromkeys(traced.invars[len(leaves) :], _TANGENT)
    reader.read(traced, env)
    return reader.program_of({env.get(v) for v in traced.outvars if not compat.is_literal(v)})


class _Linear:
    """A value of the linear part, and what it is computed from."""

    __slots__ = ("operands",)

    def __init__(self, operands: tuple[Any, ...]):
        self.operands = operands


_TANGENT = _Linear(())


class _Reader:
    """Flattens a jaxpr. A value is a number, None if it is at hand, or linear."""

    def __init__(self) -> None:
        self.program = Program()

    def read(self, jaxpr: Any, env: dict[Any, Any]) -> None:
        for eqn in jaxpr.eqns:
            operands = [None if compat.is_literal(v) else env.get(v) for v in eqn.invars]
            bodies = list(compat.sub_jaxprs(eqn.params))
            if eqn.primitive.name in CALLS and len(bodies) == 1:
                results = self._inline(bodies[0][2], operands)
            else:
                results = self._op(eqn, operands)
            env.update(zip(eqn.outvars, results, strict=True))

    def _inline(self, body: Any, operands: list[Any]) -> list[Any]:
        inner = compat.open_jaxpr(body)
        env = dict.fromkeys(inner.constvars) | dict(zip(inner.invars, operands, strict=True))
        self.read(inner, env)
        return [None if compat.is_literal(v) else env.get(v) for v in inner.outvars]

    def _op(self, eqn: Any, operands: list[Any]) -> list[Any]:
        linear = _linear_results(eqn, [isinstance(one, _Linear) for one in operands])
        known = tuple(one for one in operands if isinstance(one, int))
        outvars = [v for v, is_linear in zip(eqn.outvars, linear, strict=True) if not is_linear]
        numbers = self._values(outvars)
        if numbers:
            key = key_of(eqn.primitive, [v.aval for v in eqn.invars], eqn.params)
            is_saveable = eqn.primitive.name not in LOOPS
            op = Op(key, known, tuple(numbers), _flops(eqn), compat.source_line(eqn), is_saveable)
            self.program.ops.append(op)
        rest, through = iter(numbers), _Linear(tuple(one for one in operands if one is not None))
        return [through if is_linear else next(rest) for is_linear in linear]

    def _values(self, variables: Sequence[Any]) -> list[int]:
        first = len(self.program.num_bytes)
        self.program.num_bytes += [int(num_bytes(v.aval)) for v in variables]
        return list(range(first, len(self.program.num_bytes)))

    def program_of(self, results: set[Any]) -> Program:
        """The program, with what its results need, linear ones and others."""
        waiting = [one for one in results if isinstance(one, _Linear)]
        seen = set(waiting)
        while waiting:
            for one in waiting.pop().operands:
                if isinstance(one, int):
                    self.program.needed.add(one)
                elif one not in seen:
                    seen.add(one)
                    waiting.append(one)
        live = {one for one in results if isinstance(one, int)}
        for number, op in reversed(list(enumerate(self.program.ops))):
            if live & set(op.results):
                live |= set(op.operands)
                self.program.forward.add(number)
        return self.program


def _linear_results(eqn: Any, linear: list[bool]) -> list[bool]:
    """Which results of an equation depend on linear operands."""
    if not any(linear) or eqn.primitive.name not in ("scan", "cond"):
        return [any(linear)] * len(eqn.outvars)
    if eqn.primitive.name == "cond":
        branches = [_through(branch, linear[1:]) for branch in eqn.params["branches"]]
        return [any(one) for one in zip(*branches, strict=True)]
    consts, carry = compat.scan_parts(eqn.params)
    while True:
        results = _through(eqn.params["jaxpr"], linear)
        carried = [a or b for a, b in zip(linear[consts : consts + carry], results[:carry], strict=True)]
        if carried == linear[consts : consts + carry]:
            return results
        linear = [*linear[:consts], *carried, *linear[consts + carry :]]


def _through(body: Any, linear: Sequence[bool]) -> list[bool]:
    """Which results of a body depend on linear operands."""
    inner = compat.open_jaxpr(body)
    marked = {v for v, is_linear in zip(inner.invars, linear, strict=True) if is_linear}
    for eqn in inner.eqns:
        own = [not compat.is_literal(v) and v in marked for v in eqn.invars]
        bodies = list(compat.sub_jaxprs(eqn.params))
        if eqn.primitive.name in CALLS and len(bodies) == 1:
            results = _through(bodies[0][2], own)
        else:
            results = _linear_results(eqn, own)
        marked.update(v for v, is_linear in zip(eqn.outvars, results, strict=True) if is_linear)
    return [not compat.is_literal(v) and v in marked for v in inner.outvars]


def _flops(eqn: Any) -> float:
    """FLOPs of an equation; of a loop, those of its bodies, and each iteration of a scan."""
    bodies = [compat.open_jaxpr(body) for _, _, body in compat.sub_jaxprs(eqn.params)]
    if eqn.primitive.name not in LOOPS | CALLS:
        return work(eqn.primitive.name, [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars], eqn.params).flops
    return eqn.params.get("length", 1) * sum(_flops(inner) for body in bodies for inner in body.eqns)


def saved_bytes(fun: Callable[..., Any], *args: Any) -> int:
    """Bytes that the backward of a function keeps from its forward pass, beside its arguments and constants."""
    traced = compat.open_jaxpr(jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(fun, *args)[1]))(*args))
    at_hand = {*traced.invars, *traced.constvars}
    kept = {v for v in traced.outvars if not compat.is_literal(v)} - at_hand
    return sum(int(num_bytes(v.aval)) for v in kept)
