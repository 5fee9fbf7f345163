"""From a function and the shapes of its arguments to a jaxpr, and what of the result takes an argument's place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from . import compat, paths, rules
from .errors import ShardingError, raise_together

Facts = tuple[tuple[int, ...], Any, bool, Any]
"""Of one leaf: shape, dtype, weak type, and its sharding if it was placed."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A function as a closed jaxpr over flat arrays, with the pytree of its result."""

    jaxpr: Any
    out_tree: Any
    out_avals: list[Any]

    @property
    def closes_over_tracers(self) -> bool:
        """Whether the function uses values of a trace around it, which are gone when that ends."""
        return any(isinstance(const, compat.Tracer) for const in self.jaxpr.consts)


def context() -> Any:
    """What else than its arguments a program depends on, as a key: JAX's configuration, the users' rules."""
    return compat.trace_context(), rules.version()


def facts(x: Any) -> Facts:
    """What the program for a leaf depends on. Raises TypeError for what is no array or number."""
    if isinstance(x, jax.Array):
        sharding = x.sharding if compat.is_committed(x) else None
        return x.shape, x.dtype, getattr(x, "weak_type", False), sharding  # arrays of keys have no weak type
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.shape, x.dtype, x.weak_type, x.sharding
    aval = jax.typeof(x)
    return aval.shape, aval.dtype, aval.weak_type, None


def abstract(leaves: Sequence[Any], names: Sequence[str], function: str) -> list[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of all leaves. Raises one error for all that are no arrays."""
    avals, failures = [], []
    for leaf, name in zip(leaves, names, strict=True):
        try:
            shape, dtype, weak_type, _ = facts(leaf)
            avals.append(jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type))
        except TypeError:
            failures.append(
                ShardingError(
                    f"{function}({name})",
                    there=f"{leaf!r:.60}, of type {type(leaf).__name__}",
                    must="every leaf of an argument that is not static is an array or a number",
                    fix="static_argnames for what is compiled in",
                )
            )
    raise_together(f"{function}: arguments", failures)
    return avals


def trace(
    f: Callable[..., Any],
    avals: Sequence[Any],
    tree: Any,
    statics: Mapping[int, Any],
    names: Sequence[str],
    function: str,
) -> Traced:
    """Traces `f` once.

    Args:
        f: the function.
        avals: shape and dtype of every leaf of its arguments that are not static.
        tree: the pytree of those arguments, a tuple.
        statics: position -> value of the other arguments.
        names: of the arguments that are not static, for errors.
        function: its name, for errors and for the compiled program.

    Raises:
        ShardingError: an argument was changed in place and what it became is not returned.
    """
    out_tree = None

    def flat(*leaves: Any) -> list[Any]:
        nonlocal out_tree
        dynamic = tuple(jax.tree.unflatten(tree, leaves))
        args = list(dynamic)
        for i in sorted(statics):
            args.insert(i, statics[i])
        out_leaves, out_tree = jax.tree.flatten(f(*args))
        _refuse_mutation(leaves, tree, dynamic, out_leaves, names, function)
        return out_leaves

    flat.__name__ = flat.__qualname__ = function
    # Not `jax.jit(flat).trace`: that makes arguments of the tracers that a function closes over.
    jaxpr, out_avals = jax.make_jaxpr(flat, return_shape=True)(*avals)
    assert out_tree is not None
    return Traced(jaxpr=jaxpr, out_tree=out_tree, out_avals=out_avals)


def ranges(tree: Any) -> list[range]:
    """Which leaves belong to which argument."""
    found, at = [], 0
    for child in tree.children():
        found.append(range(at, at + child.num_leaves))
        at += child.num_leaves
    return found


def ties(
    traced: Traced, avals: Sequence[Any], tree: Any, donated: Sequence[int], taken: Sequence[bool]
) -> dict[int, int]:
    """Result leaf -> argument leaf, for parts of the result that have the tree and shapes of a donated argument.

    Args:
        traced: the program.
        avals: of the arguments' leaves.
        tree: the pytree of the arguments, a tuple.
        donated: the donated arguments; each takes the first part of the result that fits and is free.
        taken: per result leaf whether something else is asked of it.
    """
    shapes, out_shapes = [[(a.shape, a.dtype) for a in list_] for list_ in (avals, traced.out_avals)]
    parts = list(_parts(jax.tree.unflatten(traced.out_tree, range(traced.out_tree.num_leaves))))
    found: dict[int, int] = {}
    for i in donated:
        leaves, kind = ranges(tree)[i], tree.children()[i]
        wanted = [shapes[k] for k in leaves]
        for part, outs in parts:
            free = not any(o in found or taken[o] for o in outs)
            if outs and free and part == kind and [out_shapes[o] for o in outs] == wanted:
                found.update(zip(outs, leaves, strict=True))
                break
    return found


def _parts(result: Any) -> Iterator[tuple[Any, list[int]]]:
    """(tree, leaves) of the result and of everything inside it, outermost first."""
    yield jax.tree.structure(result), jax.tree.leaves(result)
    children = jax.tree.leaves(result, is_leaf=lambda x: x is not result)
    for child in children:
        if child is not result:
            yield from _parts(child)


def _refuse_mutation(
    before: Sequence[Any], tree: Any, args: Any, out: Sequence[Any], names: Sequence[str], function: str
) -> None:
    """An argument changed in place inside a traced function: an error, unless what it became is returned.

    Taking entries out of a dict is fine: the function has its own copy, and no value is lost.
    """
    returned = {id(x) for x in out}
    changed, at = [], 0
    for name, was, arg in zip(names, tree.children(), args, strict=True):
        old, (new, now) = before[at : at + was.num_leaves], jax.tree.flatten(arg)
        at += was.num_leaves
        kept = returned.union(map(id, old))
        if now != was:
            changed += [f"{name}: its pytree was changed in place"] if any(id(x) not in kept for x in new) else []
            continue
        fine = [a is b or id(b) in returned for a, b in zip(old, new, strict=True)]
        changed += [f"{n} was changed in place" for n, ok in zip(paths.of_tree(arg, name), fine, strict=True) if not ok]
    if changed:
        raise ShardingError(
            f"{function}(...)",
            there=[*changed[:8], "what it became is not returned"],
            must="a compiled function has no side effects: what it changes, it returns",
            fix="return the changed object from the function and use what comes back, or change a copy of it",
        )
