"""Tracing: from a function and the shapes of its arguments to a jaxpr."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .. import compat
from ..errors import ShardingError, raise_together
from ..mesh import tracing_context
from .arguments import Arguments
from .cache_key import leaf_key
from .explicit_mode import ExplicitMode, needs_explicit_axes
from .explicit_regions import without_explicit_axes
from .mutations import Mutations
from .nnx_variables import tied
from .ref_discharge import without_refs
from .static_attributes import StaticChange


@dataclass(frozen=True, slots=True)
class Traced:
    """A closed jaxpr over flat arrays, with the pytree of the result."""

    jaxpr: Any
    out_tree: Any
    out_avals: list[Any]
    """Of the leaves of the result, and of the updated leaves behind them."""
    updated: tuple[int, ...] = ()
    """The leaves of mutable arguments that get a new value."""
    statics: tuple[tuple[int, StaticChange], ...] = ()
    """The static attributes of mutable arguments that get a new value, each with the position of its argument."""

    @property
    def result(self) -> Any:
        """Shapes and dtypes of the result."""
        return jax.tree.unflatten(self.out_tree, self.out_avals[: self.out_tree.num_leaves])

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
    f: Callable[..., Any], arguments: Arguments, avals: Sequence[Any], explicit: ExplicitMode | None = None
) -> Traced:
    """Traces `f` with Auto axes; with Explicit ones where it names the sharding of a result.

    Args:
        f: the function.
        arguments: of the call.
        avals: shape and dtype of every leaf of the arguments that are not static.
        explicit: how to trace with Explicit axes. Default: not at all.

    Raises:
        ShardingError: an argument was mutated and its new value is not returned.
    """
    signature, out_tree, mutations = arguments.signature, None, Mutations([], [])
    by_keyword = arguments.names[arguments.num_positional :]

    @functools.wraps(f)  # JAX's errors name the user's function, its arguments and its line
    def flat(*args: Any, **kwargs: Any) -> list[Any]:
        nonlocal out_tree, mutations
        before = jax.tree.leaves((*args, *(kwargs[name] for name in by_keyword)))
        for i in arguments.refs:
            before[i] = jax.new_ref(before[i])
        dynamic = jax.tree.unflatten(arguments.tree, before)
        dynamic = tied(dynamic, arguments.dynamic) if arguments.ties else dynamic
        by_label = dict(zip(arguments.labels, dynamic, strict=True))
        by_label |= {label: value for label, _, value in arguments.statics}
        result = signature.call(f, by_label)
        out_leaves, out_tree = jax.tree.flatten(result)
        mutations = Mutations.found(before, dynamic, result, arguments)
        return [*out_leaves, *mutations.values]

    flat.__name__ = flat.__qualname__ = signature.function
    if all(map(str.isidentifier, arguments.names)):
        vars(flat)["__signature__"] = _signature(arguments)
    args, kwargs = arguments.as_passed(avals)
    # Not `jax.jit(flat).trace`: that turns closed-over tracers into arguments.
    make_jaxpr = jax.make_jaxpr(flat, return_shape=True)
    try:
        with tracing_context():
            jaxpr, out_avals = make_jaxpr(*args, **kwargs)
    except ValueError as error:
        if explicit is None or not needs_explicit_axes(error):
            raise
        args, kwargs = arguments.as_passed(explicit.types(avals))
        with explicit.tracing(signature.function, error):
            jaxpr, out_avals = make_jaxpr(*args, **kwargs)
    assert out_tree is not None
    jaxpr = without_explicit_axes(without_refs(jaxpr))
    num_results = len(out_avals) - len(mutations.leaves)
    updated = mutations.updated(jaxpr, arguments)
    kept = [*range(num_results), *(num_results + k for k in updated)]
    if len(kept) < len(out_avals):
        outvars = compat.open_jaxpr(jaxpr).outvars
        jaxpr = compat.rebuild(jaxpr, eqns=compat.open_jaxpr(jaxpr).eqns, outvars=[outvars[k] for k in kept])
    return Traced(
        jaxpr=jaxpr,
        out_tree=out_tree,
        out_avals=[out_avals[k] for k in kept],
        updated=tuple(mutations.leaves[k] for k in updated),
        statics=mutations.statics,
    )


def _signature(arguments: Arguments) -> inspect.Signature:
    """The parameters without the static ones."""
    positional, by_keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    kinds = [positional if i < arguments.num_positional else by_keyword for i in range(len(arguments.labels))]
    return inspect.Signature([inspect.Parameter(*pair) for pair in zip(arguments.names, kinds, strict=True)])


def leaf_ranges(tree: Any) -> list[range]:
    """The range of leaves of each argument."""
    found, at = [], 0
    for child in tree.children():
        found.append(range(at, at + child.num_leaves))
        at += child.num_leaves
    return found
