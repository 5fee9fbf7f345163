"""Arrays whose elements are all equal, computed as scalars.

An elementwise op of broadcast scalars (a step size times the log of an array of ones) is the op of the scalars, and a
broadcast behind it: every device computes the scalar, and takes whatever part of the broadcast each use needs. XLA
moves such broadcasts too (openxla/xla, `hlo/transforms/simplifiers/algebraic_simplifier.cc`), but not out of loops: an
array that a loop only reads is partitioned in one way for all uses, and moved to the others in every iteration. Here
the loop gets the scalar as one more constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex

from .. import compat
from ..graph import CALLS
from ..rules import ELEMENTWISE
from .constant_folding import GIVEN_OPERANDS
from .equations import inlined_call, is_placed, traced, without_unused

SCALAR_OPS = ELEMENTWISE - frozenset(
    """
    copy layout_constraint name philox2x32 philox4x32 pvary random_clone random_fold_in random_gamma random_gamma_grad
    reshard threefry2x32 threefry4x32 xla_metadata_value
    """.split()
)
"""Elementwise primitives of numbers that say nothing of where or how something is computed."""

SHAPE_OPS = frozenset({"broadcast_in_dim", "reshape", "rev", "slice", "squeeze", "transpose"})
"""Primitives whose result has the elements of the first operand."""

DIFFERENT, CONSTANT, EQUAL = range(3)
"""What is known of an array: nothing, that all elements are a constant, or that they are equal."""

Kinds = tuple[int, ...]


def as_scalars(jaxpr: Any) -> Any:
    """The jaxpr, which computes the same, with arrays of equal elements computed as scalars; itself if it has none."""
    return _Pass().jaxpr(jaxpr)[0]


class _Pass:
    def __init__(self) -> None:
        self.found: dict[tuple[int, Kinds], tuple[Any, Kinds, int]] = {}
        """Id of a jaxpr and the kinds of its inputs -> the jaxpr, the kinds of its results, and how many equations are
        computed as scalars."""
        self.done: dict[tuple[int, Kinds, tuple[int, ...]], tuple[Any, Any, list[int]]] = {}
        """Id of a jaxpr, kinds of its inputs and those whose scalars it gets -> the jaxpr, its result, and which these
        are."""

    def jaxpr(self, jaxpr: Any, kinds: Kinds = (), given: tuple[int, ...] = ()) -> tuple[Any, list[int]]:
        """The rewritten jaxpr, and the inputs whose scalars it has as further inputs.

        Args:
            jaxpr: the jaxpr.
            kinds: those of its first inputs, behind which the scalars stand.
            given: inputs whose scalars it has in any case.
        """
        key = (id(jaxpr), kinds, given)
        if key not in self.done:
            self.done[key] = (jaxpr, *self.rewritten(jaxpr, kinds, given))
        return self.done[key][1:]

    def rewritten(self, jaxpr: Any, kinds: Kinds, given: tuple[int, ...]) -> tuple[Any, list[int]]:
        source = compat.open_jaxpr(jaxpr)
        body = _Body(self, dict(zip(source.invars, kinds, strict=False)))
        body.add(source.eqns)
        if not body.is_changed and not given:
            return jaxpr, []
        scalars = [body.scalar(v) if k in given else body.scalars.get(v) for k, v in enumerate(source.invars)]
        needed = [k for k, scalar in enumerate(scalars) if scalar is not None]
        invars = [*source.invars[: len(kinds)], *(scalars[k] for k in needed), *source.invars[len(kinds) :]]
        eqns = without_unused(body.eqns, source.outvars, body.makers.keys())
        return compat.rebuild(jaxpr, invars=invars, eqns=eqns, outvars=source.outvars), needed

    def results(self, jaxpr: Any, inputs: Kinds) -> tuple[Kinds, int]:
        """The kinds of a jaxpr's results, and the number of equations that are computed as scalars."""
        key = (id(jaxpr), inputs)
        if key not in self.found:
            source = compat.open_jaxpr(jaxpr)
            known = dict(zip(source.invars, inputs, strict=False))
            number = 0
            for eqn in source.eqns:
                number += self.note(eqn, known)
            self.found[key] = jaxpr, tuple(_kind(v, known) for v in source.outvars), number
        return self.found[key][1:]

    def note(self, eqn: Any, known: dict[Any, int]) -> int:
        """Adds what is known of an equation's results; returns how many equations in it are computed as scalars."""
        if eqn.primitive.name in GIVEN_OPERANDS:
            kinds, number = self.results(_called(eqn), _kinds(eqn.invars, known))
            if self.is_inlined(eqn, known):
                known.update((v, kind) for v, kind in zip(eqn.outvars, kinds, strict=True) if kind)
            return number
        kind = _result(eqn, known)
        if kind:
            known[eqn.outvars[0]] = kind
        return _is_computed(eqn, kind)

    def is_inlined(self, eqn: Any, known: dict[Any, int]) -> bool:
        """Whether operands of a call decide that something in it is a scalar, or it returns an array of one."""
        if eqn.primitive.name not in GIVEN_OPERANDS:
            return False
        kinds, number = self.results(_called(eqn), _kinds(eqn.invars, known))
        returns_equals = any(kind == EQUAL and v.aval.shape for v, kind in zip(eqn.outvars, kinds, strict=True))
        return returns_equals or number > self.results(_called(eqn), ())[1]


class _Body:
    """The equations of one body, as they are rewritten."""

    def __init__(self, rewriting: _Pass, known: dict[Any, int]) -> None:
        self.rewriting, self.known = rewriting, known
        self.eqns: list[Any] = []
        self.makers: dict[Any, Any] = {}
        """Array of equal elements -> the equation that makes it."""
        self.scalars: dict[Any, Any] = {}
        """Array of equal elements -> the scalar that they are, where something needs it."""
        self.is_changed = False

    def add(self, eqns: Sequence[Any]) -> None:
        for eqn in eqns:
            if self.rewriting.is_inlined(eqn, self.known) and (inner := inlined_call(eqn)) != [eqn]:
                self.is_changed = True
                self.add(inner)
            else:
                self.add_one(eqn)

    def add_one(self, eqn: Any) -> None:
        kind = _result(eqn, self.known)
        if kind:
            self.known[eqn.outvars[0]] = kind
            self.makers[eqn.outvars[0]] = eqn
        if _is_computed(eqn, kind):
            (result,) = eqn.outvars
            spread = partial(jax.lax.broadcast, sizes=result.aval.shape)
            new = traced(eqn, spread, [self.scalar(result)], eqn.outvars)
        else:
            new = self.with_bodies(eqn)
        self.is_changed = self.is_changed or new is not eqn
        self.eqns.append(new)

    def scalar(self, array: Any) -> Any:
        """The scalar that all elements are; adds the equations that compute it, of which each is added once."""
        waiting = [array]
        while waiting:
            one = waiting[-1]
            maker = self.makers.get(one)
            operands = [] if maker is None else _sources(maker)
            missing = [v for v in operands if self.read(v) is None]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if one in self.scalars:
                continue
            if maker is None:
                self.scalars[one] = jex.Var(one.aval.update(shape=()))
            elif maker.primitive.name in SHAPE_OPS:
                self.scalars[one] = self.read(operands[0])
            else:
                new = traced(maker, _bound(maker), [self.read(v) for v in operands])
                self.eqns.append(new)
                (self.scalars[one],) = new.outvars
        return self.scalars[array]

    def read(self, atom: Any) -> Any:
        """An atom as a scalar; None if that is not known yet."""
        return atom if not atom.aval.shape else self.scalars.get(atom)

    def with_bodies(self, eqn: Any) -> Any:
        """An equation with rewritten bodies; itself if none changes."""
        name = eqn.primitive.name
        if name == "cond":
            return self.with_branches(eqn)
        if name == "scan":
            return self.with_body(eqn, "jaxpr", 0, compat.scan_parts(eqn.params)[0])
        if name == "while":
            first = eqn.params["cond_nconsts"]
            return self.with_body(eqn, "body_jaxpr", first, first + eqn.params["body_nconsts"])
        params = eqn.params
        for key, position, body in compat.sub_jaxprs(params) if name in CALLS else ():
            new, _ = self.rewriting.jaxpr(body)
            params = params if new is body else compat.with_jaxpr(params, key, position, new)
        return eqn if params is eqn.params else eqn.replace(params=params)

    def with_body(self, loop: Any, key: str, first: int, end: int) -> Any:
        """A loop whose operands from the first to the end are constants of its body."""
        kinds = _kinds(loop.invars[first:end], self.known)
        body, needed = self.rewriting.jaxpr(loop.params[key], kinds)
        if body is loop.params[key]:
            return loop
        more = [self.scalar(loop.invars[first + k]) for k in needed]
        operands = [*loop.invars[:end], *more, *loop.invars[end:]]
        params = compat.with_constants(loop.primitive.name, loop.params | {key: body}, len(more))
        return loop.replace(invars=operands, params=params)

    def with_branches(self, eqn: Any) -> Any:
        kinds, branches = _kinds(eqn.invars[1:], self.known), eqn.params["branches"]
        needed = tuple(sorted({k for branch in branches for k in self.rewriting.jaxpr(branch, kinds)[1]}))
        new = tuple(self.rewriting.jaxpr(branch, kinds, needed)[0] for branch in branches)
        if all(branch is old for branch, old in zip(new, branches, strict=True)):
            return eqn
        operands = [*eqn.invars, *(self.scalar(eqn.invars[1 + k]) for k in needed)]
        return eqn.replace(invars=operands, params=eqn.params | {"branches": new})


def _kinds(atoms: Sequence[Any], known: dict[Any, int]) -> Kinds:
    return tuple(_kind(v, known) for v in atoms)


def _kind(atom: Any, known: dict[Any, int]) -> int:
    if compat.is_literal(atom):
        return DIFFERENT if atom.aval.shape else CONSTANT
    return known.get(atom, DIFFERENT if atom.aval.shape else EQUAL)


def _result(eqn: Any, known: dict[Any, int]) -> int:
    """What is known of an equation's result."""
    name = eqn.primitive.name
    if len(eqn.outvars) != 1 or not eqn.invars or compat.is_drop(eqn.outvars[0]):
        return DIFFERENT
    if (name not in SCALAR_OPS and name not in SHAPE_OPS) or is_placed(eqn):
        return DIFFERENT
    kinds = _kinds(_sources(eqn), known)
    return max(kinds) if all(kinds) else DIFFERENT


def _is_computed(eqn: Any, kind: int) -> bool:
    """Whether an equation that makes an array of some kind is computed as a scalar: not if it only broadcasts one."""
    is_broadcast = eqn.primitive.name == "broadcast_in_dim" and not eqn.invars[0].aval.shape
    return kind == EQUAL and bool(eqn.outvars[0].aval.shape) and not is_broadcast


def _sources(eqn: Any) -> Sequence[Any]:
    """The operands whose elements a result has or is computed of."""
    return eqn.invars[:1] if eqn.primitive.name in SHAPE_OPS else eqn.invars


def _called(call: Any) -> Any:
    (_, _, body), *_ = compat.sub_jaxprs(call.params)
    return body


def _bound(eqn: Any) -> Callable[..., Any]:
    return lambda *operands: eqn.primitive.bind(*operands, **eqn.params)
