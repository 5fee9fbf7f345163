"""Masks and other broadcasts that loops read are computed in the loops.

JAX computes before a loop over layers what its body computes of constants: the mask of causal attention and the number
that it puts there, both as large as all scores. XLA moves constants back into loops before it partitions (openxla/xla,
`service/while_loop_constant_sinking.cc`), but not those with a sharding constraint; XLA:TPU also moves what elementwise
ops make of broadcasts. Here all of these are computed in the loops, whatever the compiler: kernels compute them as they
go, and nothing is stored while a loop runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from .. import compat
from ..graph import CALLS
from ..rules import ELEMENTWISE
from .constant_folding import GIVEN_OPERANDS, OF_OPERANDS
from .equations import inlined_call, is_placed, without_unused
from .loop_invariants import LOOPS, constants_of, num_bytes

CHEAP = frozenset(
    """
    abs add and broadcast_in_dim convert_element_type copy eq expand_dims ge gt iota le lt max min mul ne neg not or
    reshape rev select_n sign squeeze stop_gradient sub transpose xor
    """.split()
)
"""Primitives that kernels compute again as fast as they read their results."""

READERS = (ELEMENTWISE | CHEAP | {"reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"}) - {"rev"}
"""Primitives whose kernels compute their operands."""

ENTERED = CALLS | LOOPS.keys() | {"cond"}
"""Primitives whose bodies are rewritten, too."""

LEAST_BYTES = 2**16
"""What is smaller stays."""
LEAST_RATIO = 2
"""How many times larger than what it is computed of an array is."""


def sink_broadcasts(jaxpr: Any) -> Any:
    """The jaxpr, which computes the same, with such arrays computed in loops; itself if there are none."""
    return _Pass().jaxpr(jaxpr)


class _Pass:
    def __init__(self) -> None:
        self.done: dict[int, tuple[Any, Any]] = {}
        """Id of a jaxpr -> the jaxpr, which keeps the id valid, and its result."""

    def jaxpr(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self.done:
            self.done[id(jaxpr)] = (jaxpr, self.rewritten(jaxpr))
        return self.done[id(jaxpr)][1]

    def rewritten(self, jaxpr: Any) -> Any:
        source = compat.open_jaxpr(jaxpr)
        given = _with_inlined_calls(source.eqns)
        makers = {eqn.outvars[0]: eqn for eqn in given if _is_cheap(eqn)}
        sunk = [_with_own_broadcasts(eqn, makers) for eqn in given]
        is_changed = any(eqn is not old for eqn, old in zip(sunk, given, strict=True))
        eqns = without_unused(sunk, source.outvars, makers.keys()) if is_changed else source.eqns
        new = [self.with_bodies(eqn) for eqn in eqns]
        if not is_changed and all(eqn is old for eqn, old in zip(new, eqns, strict=True)):
            return jaxpr
        return compat.rebuild(jaxpr, eqns=new, outvars=source.outvars)

    def with_bodies(self, eqn: Any) -> Any:
        """An equation with rewritten bodies; itself if none changes."""
        params = eqn.params
        for key, position, body in compat.sub_jaxprs(params) if eqn.primitive.name in ENTERED else ():
            new = self.jaxpr(body)
            params = params if new is body else compat.with_jaxpr(params, key, position, new)
        return eqn if params is eqn.params else eqn.replace(params=params)


def _with_inlined_calls(eqns: Sequence[Any]) -> list[Any]:
    """The equations, with calls inlined that loops read and that compute nothing but what may move into them."""
    wanted: set[Any] = set()
    found: list[Any] = []
    for eqn in reversed(eqns):
        if eqn.primitive.name in LOOPS:
            wanted.update(_variables(eqn.invars[slice(*constants_of(eqn))]))
        inner = [eqn]
        if not wanted.isdisjoint(eqn.outvars):
            is_cheap_call = eqn.primitive.name in GIVEN_OPERANDS and all(map(_is_cheap, _called(eqn)))
            inner = _inlined(eqn) if is_cheap_call else inner
            wanted.update(v for one in inner if _is_cheap(one) for v in _variables(one.invars))
        found += reversed(inner)
    return found[::-1]


def _inlined(call: Any) -> list[Any]:
    """The equations that a call runs, with those of the calls in it."""
    inner = inlined_call(call) if call.primitive.name in GIVEN_OPERANDS else [call]
    return inner if inner == [call] else [one for eqn in inner for one in _inlined(eqn)]


def _called(call: Any) -> Iterator[Any]:
    """The equations of a call's body, and of the calls in it."""
    (_, _, body), *_ = compat.sub_jaxprs(call.params)
    for eqn in compat.open_jaxpr(body).eqns:
        yield from _called(eqn) if eqn.primitive.name in GIVEN_OPERANDS else (eqn,)


def _with_own_broadcasts(loop: Any, makers: Mapping[Any, Any]) -> Any:
    """A loop that computes such operands itself; any other equation as it is.

    Args:
        makers: array -> the cheap equation in front of the loop that makes it.
    """
    if loop.primitive.name not in LOOPS:
        return loop
    key, (first, end) = LOOPS[loop.primitive.name], constants_of(loop)
    body = compat.open_jaxpr(loop.params[key])
    outside = dict(zip(body.invars, loop.invars[first:end], strict=False))
    moved = {
        argument: v
        for argument, v in outside.items()
        if not compat.is_literal(v) and _is_spread(v, makers) and _is_computed_by_readers(argument, body)
    }
    if not moved:
        return loop
    chain, read = _chain([*moved.values()], makers)
    kept = [argument for argument in outside if argument not in moved]
    names = {outside[argument]: argument for argument in kept if not compat.is_literal(outside[argument])}
    added = [v for v in read if v not in names]
    names.update((v, jex.Var(v.aval)) for v in added)
    before = [compat.renamed(eqn, names) for eqn in chain]
    own = {argument: names[v] for argument, v in moved.items()}
    eqns = [eqn.replace(invars=[v if compat.is_literal(v) else own.get(v, v) for v in eqn.invars]) for eqn in body.eqns]
    invars = [*kept, *(names[v] for v in added), *body.invars[end - first :]]
    new = compat.rebuild(loop.params[key], invars=invars, eqns=[*before, *eqns], outvars=body.outvars)
    operands = [*loop.invars[:first], *(outside[argument] for argument in kept), *added, *loop.invars[end:]]
    params = compat.with_constants(loop.primitive.name, loop.params | {key: new}, len(added) - len(moved))
    return loop.replace(invars=operands, params=params)


def _is_spread(array: Any, makers: Mapping[Any, Any]) -> bool:
    """Whether an array is large, and cheap equations compute it of much smaller ones."""
    if array not in makers or num_bytes([array]) < LEAST_BYTES:
        return False
    _, read = _chain([array], makers)
    return LEAST_RATIO * num_bytes(read) <= num_bytes([array])


def _chain(arrays: Sequence[Any], makers: Mapping[Any, Any]) -> tuple[list[Any], list[Any]]:
    """The cheap equations that make arrays, in order, and the variables that they read."""
    chain: dict[int, Any] = {}
    read: dict[Any, None] = {}
    waiting = [*reversed(arrays)]
    while waiting:
        one = waiting[-1]
        maker = makers.get(one)
        missing = [] if maker is None else [v for v in _variables(maker.invars) if v in makers]
        missing = [v for v in missing if id(makers[v]) not in chain]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        if maker is not None and id(maker) not in chain:
            chain[id(maker)] = maker
            read.update(dict.fromkeys(v for v in _variables(maker.invars) if v not in makers))
    return [*chain.values()], [*read]


def _is_computed_by_readers(argument: Any, body: Any) -> bool:
    """Whether the kernels of all that read an argument of a body compute it."""
    if any(v is argument for v in body.outvars):
        return False
    for eqn in body.eqns:
        places = [k for k, v in enumerate(eqn.invars) if v is argument]
        if places and not (eqn.primitive.name in READERS or _is_computed_inside(eqn, places)):
            return False
    return True


def _is_computed_inside(eqn: Any, places: Sequence[int]) -> bool:
    """The same of operands of a call, or of constants of an inner loop."""
    name, first, end = eqn.primitive.name, 0, len(eqn.invars)
    if name in LOOPS:
        body, (first, end) = eqn.params[LOOPS[name]], constants_of(eqn)
    elif name in OF_OPERANDS:
        (_, _, body), *_ = compat.sub_jaxprs(eqn.params)
    else:
        return False
    inner = compat.open_jaxpr(body)
    return all(first <= k < end and _is_computed_by_readers(inner.invars[k - first], inner) for k in places)


def _is_cheap(eqn: Any) -> bool:
    is_single = len(eqn.outvars) == 1 and not compat.is_drop(eqn.outvars[0])
    return eqn.primitive.name in CHEAP and is_single and not is_placed(eqn)


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [v for v in atoms if not compat.is_literal(v)]
