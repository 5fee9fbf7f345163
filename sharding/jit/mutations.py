"""Arguments that a function mutates in place: variables of a model, metrics, an optimizer's state.

A jitted function works on copies, so a new value is lost unless it is returned. Of arguments declared `mutable`, the
variables and static attributes of the caller's own objects get it after the call, as with `flax.nnx.jit`; of others a
lost value is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from .. import compat
from ..errors import ShardingError
from ..graph import CALLS
from . import static_attributes
from .arguments import Arguments
from .nnx_variables import variables
from .static_attributes import StaticChange


class Mutations(NamedTuple):
    """The leaves of the arguments that are other tracers after the function, and these."""

    leaves: list[int]
    values: list[Any]
    statics: tuple[tuple[int, StaticChange], ...] = ()
    """The static attributes that changed, each with the position of its argument."""

    @staticmethod
    def found(before: Sequence[Any], args: Sequence[Any], result: Any, arguments: Arguments) -> Mutations:
        """Compares the arguments inside a traced function, after it ran, with what they were before.

        Removing entries from a dict is fine: the function has its own copy, and no value is lost.

        Args:
            before: the leaves of the arguments before.
            args: the arguments after.
            result: of the function.
            arguments: of the call.

        Raises:
            ShardingError: a value was added to an argument; only values of variables can be written back. Or a static
                attribute was changed of an argument that is not mutable and not returned, or parts of one that is
                were moved.
        """
        leaves, values, statics, added, at = list[int](), [], list[tuple[int, StaticChange]](), [], 0
        results, out_tree = jax.tree.flatten(result)
        for i, (was, arg) in enumerate(zip(arguments.tree.children(), args, strict=True)):
            old, (new, now) = before[at : at + was.num_leaves], jax.tree.flatten(arg)
            if now == was or _leaf_paths(now) == _leaf_paths(was):
                changed = [k for k, (a, b) in enumerate(zip(old, new, strict=True)) if a is not b]
                leaves += [at + k for k in changed]
                values += [new[k] for k in changed]
            else:
                known, place = {*map(id, old), *map(id, results)}, {path: k for k, path in enumerate(_leaf_paths(was))}
                fresh = [(path, x) for path, x in zip(_leaf_paths(now), new, strict=True) if id(x) not in known]
                if any(path not in place for path, _ in fresh):
                    added.append(f"{arguments.names[i]}: its pytree was mutated")
                else:
                    leaves += [at + place[path] for path, _ in fresh]
                    values += [x for _, x in fresh]
            if now != was and not static_attributes.contains(out_tree, now):
                statics += [(i, change) for change in static_attributes.changes(was, now)]
            at += was.num_leaves
        first = [k for k, leaf in enumerate(leaves) if leaf not in arguments.ties]
        leaves, values = [leaves[k] for k in first], [values[k] for k in first]
        leaves += arguments.refs
        values += [before[i][...] for i in arguments.refs]
        if added:
            raise _error(arguments.signature.function, added, may_declare=False)
        _refuse_lost(statics, arguments)
        is_mutable = [*map(arguments.signature.is_mutable, arguments.labels)]
        return Mutations(leaves, values, tuple((i, change) for i, change in statics if is_mutable[i]))

    def updated(self, jaxpr: Any, arguments: Arguments) -> list[int]:
        """Which of these have a new value that must be written back.

        Not those that a call inside (`nnx.jit`, `nnx.remat`) only passed through, nor those that are returned.

        Args:
            jaxpr: the program; its last results are the values.
            arguments: of the call.

        Raises:
            ShardingError: a new value of an argument that is not mutable, or outside of a variable.
        """
        if not self.leaves:
            return []
        inner = compat.open_jaxpr(jaxpr)
        sources = _Sources(inner)
        results = [sources.of(v) for v in inner.outvars]
        returned = {*map(id, results[: -len(self.leaves)])}
        refs = arguments.refs
        fresh = [
            k
            for k, (leaf, new) in enumerate(zip(self.leaves, results[-len(self.leaves) :], strict=True))
            if new is not inner.invars[leaf]
        ]
        is_mutable = [of_argument or i in refs for i, of_argument in enumerate(_is_mutable(arguments))]
        lost = [
            k for k in fresh if not is_mutable[self.leaves[k]] and id(results[k - len(self.leaves)]) not in returned
        ]
        if lost:
            names = arguments.leaf_names
            found = [f"{names[self.leaves[k]]} was mutated" for k in lost]
            raise _error(arguments.signature.function, found, may_declare=True)
        written = [k for k in fresh if is_mutable[self.leaves[k]]]
        in_variables = {*refs, *(leaf for leaves, _ in variables(arguments.dynamic) for leaf in leaves)}
        if outside := [self.leaves[k] for k in written if self.leaves[k] not in in_variables]:
            names = arguments.leaf_names
            found = [f"{names[leaf]} was mutated, and is not an nnx.Variable" for leaf in outside]
            raise _error(arguments.signature.function, found, may_declare=False)
        return written


def unchanged(arguments: Arguments, updated: Sequence[int]) -> frozenset[int]:
    """The leaves of variables of mutable arguments that get no new value, which stay the caller's if donated."""
    if arguments.signature.mutable == frozenset():
        return frozenset()
    is_mutable = _is_mutable(arguments)
    leaves = {leaf for found, _ in variables(arguments.dynamic) for leaf in found}
    return frozenset(leaf for leaf in leaves.difference(updated) if is_mutable[leaf])


def _is_mutable(arguments: Arguments) -> list[bool]:
    """Whether each leaf is of a mutable argument."""
    owners = zip(arguments.labels, arguments.tree.children(), strict=True)
    return [arguments.signature.is_mutable(label) for label, tree in owners for _ in range(tree.num_leaves)]


def _leaf_paths(tree: Any) -> list[Any]:
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))]


def _refuse_lost(statics: Sequence[tuple[int, StaticChange]], arguments: Arguments) -> None:
    """Raises for changed static attributes that cannot be, or are not to be, given to the caller's object."""
    is_mutable = [*map(arguments.signature.is_mutable, arguments.labels)]
    lost = [
        (i, change)
        for i, change in statics
        if (change.attributes is None or not is_mutable[i]) and (is_mutable[i] or not change.is_of_parts)
    ]
    if lost:
        found = [change.text(arguments.names[i]) for i, change in lost]
        may_declare = all(change.attributes is not None for _, change in lost)
        raise _error(arguments.signature.function, found, may_declare=may_declare)


def write_back(args: Any, updated: Sequence[int], values: Sequence[Any]) -> None:
    """Gives the caller's variables and Refs their new values.

    Args:
        args: the caller's arguments.
        updated: leaves of the arguments.
        values: the new value of each.
    """
    new = dict(zip(updated, values, strict=True))
    for leaf, ref in enumerate(jax.tree.leaves(args)):
        if leaf in new and compat.is_ref(ref):
            ref[...] = new.pop(leaf)
    for leaves, variable in variables(args):
        if not new.keys().isdisjoint(leaves):
            old, tree = jax.tree.flatten(variable)
            merged = jax.tree.unflatten(tree, [new.get(leaf, x) for leaf, x in zip(leaves, old, strict=True)])
            variable.set_raw_value(merged.get_raw_value())


class _Sources:
    """Where the values of a jaxpr come from, through calls that pass them on."""

    def __init__(self, jaxpr: Any):
        self.producers = {v: (eqn, i) for eqn in jaxpr.eqns for i, v in enumerate(eqn.outvars)}

    def of(self, value: Any) -> Any:
        """The input or result that a value is the same as."""
        while not compat.is_literal(value) and value in self.producers:
            eqn, position = self.producers[value]
            body = next((body for _, _, body in compat.sub_jaxprs(eqn.params)), None)
            if eqn.primitive.name not in CALLS or body is None:
                return value
            body = compat.open_jaxpr(body)
            inside = _Sources(body).of(body.outvars[position])
            if compat.is_literal(inside) or inside not in body.invars or len(body.invars) != len(eqn.invars):
                return value
            value = eqn.invars[body.invars.index(inside)]
        return value


def _error(function: str, found: Sequence[str], *, may_declare: bool) -> ShardingError:
    declared = ["mutable=True, to have the new values written into your nnx objects after the call"]
    return ShardingError(
        f"{function}(...)",
        found=[*found[:8], "the new value is not returned"],
        required="a pure function, which returns every value it changes",
        fix=["return the changed object and use the result, or change a copy", *(declared if may_declare else [])],
    )
