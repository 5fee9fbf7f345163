"""Tracing: from a function and the shapes of its arguments to a jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .. import compat, paths
from ..errors import ShardingError, raise_together
from ..mesh import tracing_context
from .cache_key import leaf_key


@dataclass(frozen=True, slots=True)
class Traced:
    """A closed jaxpr over flat arrays, with the pytree of the result."""

    jaxpr: Any
    out_tree: Any
    out_avals: list[Any]

    @property
    def closes_over_tracers(self) -> bool:
        """Whether the function closes over tracers of an enclosing trace, which do not outlive it."""
        return any(isinstance(const, compat.Tracer) for const in self.jaxpr.consts)


def abstract_leaves(leaves: Sequence[Any], names: Sequence[str], function: str) -> list[jax.ShapeDtypeStruct]:
    """The abstract leaves. Raises one error for all leaves that are not arrays."""
    avals, failures = [], []
    for leaf, name in zip(leaves, names, strict=True):
        try:
            shape, dtype, weak_type, _ = leaf_key(leaf)
            avals.append(jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type))
        except TypeError:
            failures.append(
                ShardingError(
                    f"{function}({name})",
                    found=f"{leaf!r:.60}, of type {type(leaf).__name__}",
                    required="arrays or numbers as leaves of non-static arguments",
                    fix="static_argnames for compile-time constants",
                )
            )
    raise_together(f"{function}: arguments", failures)
    return avals


def in_memory(avals: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """The abstract leaves, those in other memory than the device's with a sharding that names it."""
    return [
        aval
        if sharding is None or sharding.memory_kind in (None, "device")
        else jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)
        for aval, sharding in zip(avals, shardings, strict=True)
    ]


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
        avals: shape and dtype of every leaf of the non-static arguments.
        tree: the pytree of those arguments, a tuple.
        statics: position -> value of the static arguments.
        names: of the non-static arguments, for errors.
        function: its name, for errors and for the compiled program.

    Raises:
        ShardingError: an argument was mutated and its new value is not returned.
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
    # Not `jax.jit(flat).trace`: that turns closed-over tracers into arguments.
    with tracing_context():
        jaxpr, out_avals = jax.make_jaxpr(flat, return_shape=True)(*avals)
    assert out_tree is not None
    if any(map(compat.is_ref, compat.constants(jaxpr))):
        raise ShardingError(
            f"{function}(...)",
            found="a mutable array (jax.new_ref) that the function closes over",
            required="a pure function of arrays; a mutable array that the function makes itself is fine",
            fix="pass its value, ref[...], as an argument and return the new value",
        )
    jaxpr = compat.without_refs(jaxpr) if compat.uses_refs(jaxpr) else jaxpr
    return Traced(jaxpr=jaxpr, out_tree=out_tree, out_avals=out_avals)


def leaf_ranges(tree: Any) -> list[range]:
    """The range of leaves of each argument."""
    found, at = [], 0
    for child in tree.children():
        found.append(range(at, at + child.num_leaves))
        at += child.num_leaves
    return found


def _refuse_mutation(
    before: Sequence[Any], tree: Any, args: Any, out: Sequence[Any], names: Sequence[str], function: str
) -> None:
    """Raises for an argument mutated inside a traced function, unless its new value is returned.

    Removing entries from a dict is fine: the function has its own copy, and no value is lost.
    """
    returned = {id(x) for x in out}
    changed, at = [], 0
    for name, was, arg in zip(names, tree.children(), args, strict=True):
        old, (new, now) = before[at : at + was.num_leaves], jax.tree.flatten(arg)
        at += was.num_leaves
        kept = returned.union(map(id, old))
        if now != was:
            changed += [f"{name}: its pytree was mutated"] if any(id(x) not in kept for x in new) else []
            continue
        fine = [a is b or id(b) in returned for a, b in zip(old, new, strict=True)]
        changed += [f"{n} was mutated" for n, ok in zip(paths.of_tree(arg, name), fine, strict=True) if not ok]
    if changed:
        raise ShardingError(
            f"{function}(...)",
            found=[*changed[:8], "the new value is not returned"],
            required="a pure function, which returns every value it changes",
            fix="return the changed object and use the result, or change a copy",
        )
