"""A completed program and its jitted forms: on flat arrays, inside another trace, on pytrees."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from .. import compat
from ..completion import Completion
from ..distributed import consistency, heartbeat
from ..errors import ShardingError
from ..mesh import abstract, with_auto_axes
from ..rewrite.constrain import constrain
from ..spec import limited_to
from . import nonfinite, static_attributes, tracing
from .argument_shardings import committed_sharding
from .arguments import Arguments
from .array_layouts import Layouts, constrained_inside, with_layouts
from .cache_key import leaf_key
from .mutations import write_back
from .placed_arguments import PlacedArguments, is_abstract, is_in_memory, needs_transfer
from .signature import signature_of
from .tracing import Traced

_EXPLICIT = AxisType.Explicit


class ArgumentMismatch(Exception):
    """An executable was called with arguments of other shapes, dtypes or shardings than it was built for."""


@dataclass(eq=False)
class Executable:
    """A traced function constrained to its completion; compiles on the first call."""

    function: str
    mesh: Mesh | AbstractMesh
    traced: Traced
    completion: Completion
    constrained: bool
    """Whether every value is constrained, or only the annotated ones."""
    shardings: dict[tuple[P, int, str | None], NamedSharding] = field(default_factory=dict)
    """(spec, ndim, kind of memory) -> the one NamedSharding object used for it."""
    layouts: tuple[Layouts, Layouts] = ((), ())
    """Those asked for of arguments and results."""
    of_jax: Mapping[str, Any] = field(default_factory=dict)
    """Options of `jax.jit`."""
    on_rewritten: Callable[[], None] | None = None
    """Called when the program has been constrained, which searches how its ops run."""
    checked_across_processes: bool = False
    """Whether all processes are known to run this same program."""
    ran_on_fast_path: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    """For what threads that call it at once must make once."""

    def accepts(self, leaves: Sequence[Any]) -> bool:
        """Whether all committed arrays have exactly the shardings, and kinds of memory, that this program takes."""
        return all(map(is_in_memory, leaves, self.memory_kinds)) and all(
            have is None or (required is not None and have.is_equivalent_to(required, len(leaf.shape)))
            for leaf, required in zip(leaves, self.in_shardings, strict=True)
            for have in [committed_sharding(leaf, self.mesh)]
        )

    def misplaced(self, leaves: Sequence[Any]) -> tuple[int, ...]:
        """The leaves that must be transferred before the call.

        Transferring them here, not inside `jax.jit`, lets it see identical calls: it would otherwise compile once for
        arrays from outside and once more for its own results.
        """
        pairs = zip(leaves, self.in_formats, strict=True)
        return tuple(i for i, (x, required) in enumerate(pairs) if needs_transfer(x, required))

    def run(self, call: Arguments, misplaced: tuple[int, ...]) -> Any:
        """Runs on arrays on real devices, or on tracers.

        Raises:
            ShardingError: described devices, or a ShapeDtypeStruct instead of an array.
        """
        leaves = call.leaves
        traced = self.traced.closes_over_tracers or any(isinstance(x, compat.Tracer) for x in leaves)
        if traced or (isinstance(self.mesh, AbstractMesh) and compat.in_trace()):
            return self.result(self.nested_jit(*leaves), call.dynamic)
        self.refuse_abstract(leaves)
        if any(_is_deleted(leaves[i]) for i in self.donated_leaves):
            self._refuse_deleted(leaves)
        first = not self.checked_across_processes
        if first:
            self._check_across_processes()
        moved = self.transfer(leaves, misplaced)
        try:
            with heartbeat.reporting_compilation() if first else contextlib.nullcontext():
                results = self.flat_jit(*leaves)
        except FloatingPointError as error:
            raise self._located(error, leaves) from None
        _delete(moved, leaves)
        return self.result(results, call.dynamic)

    def transfer(self, leaves: list[Any], misplaced: tuple[int, ...]) -> dict[int, Any]:
        """Transfers leaves to where the program takes them; returns the donated ones as they were."""
        if not misplaced:
            return {}
        before = [leaves[i] for i in misplaced]
        self.placed_arguments.move(leaves, misplaced, self.in_formats)
        return {i: x for i, x in zip(misplaced, before, strict=True) if i in self.donated_leaves}

    def run_again(self, leaves: list[Any], misplaced: tuple[int, ...], args: Sequence[Any]) -> Any:
        """Runs on arrays and numbers that probably have the shapes and shardings this program takes.

        Raises:
            ArgumentMismatch: a shape, dtype or sharding differs; nothing was run.
        """
        if self.donated_leaves:
            deleted = [_is_deleted(leaves[i]) for i in self.donated_leaves]  # a list: faster than a generator
            if any(deleted):
                self._refuse_deleted(leaves)
        try:
            moved = self.transfer(leaves, misplaced)
            results = self.flat_jit(*leaves)
        except (TypeError, ValueError) as error:  # JAX compares shardings with in_shardings before it starts anything
            if any(_is_deleted(leaves[i]) for i in self.donated_leaves):
                raise
            raise ArgumentMismatch from error
        except FloatingPointError as error:
            raise self._located(error, leaves) from None
        if moved:
            _delete(moved, leaves)
        return self.result(results, args)

    def _located(self, error: FloatingPointError, leaves: Sequence[Any]) -> FloatingPointError:
        """JAX's error for `jax_debug_nans` and `jax_debug_infs`, with the op that made the value, and its line."""
        if any(_is_deleted(x) for x in leaves):
            return error
        found = nonfinite.of_program(self.traced.jaxpr, leaves, self.leaf_names)
        return FloatingPointError(f"{self.function}: {found[-1]}") if found else error

    def result(self, results: list[Any], args: Sequence[Any]) -> Any:
        """The result of the function; the variables and static attributes of mutable arguments get their new values."""
        if self.traced.updated:
            number = self.traced.out_tree.num_leaves
            write_back(args, self.traced.updated, results[number:])
            results = results[:number]
        if self.traced.statics:
            static_attributes.apply(args, self.traced.statics)
        return jax.tree.unflatten(self.traced.out_tree, results)

    def _check_across_processes(self) -> None:
        """Raises if another process is about to run a different program, which would deadlock."""
        if isinstance(self.mesh, Mesh) and self.mesh.is_multi_process:
            avals = self.traced.jaxpr.in_avals
            shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals]
            consistency.agree({"program": self.flat_jit.lower(*shapes).as_text()}, about=f"compile {self.function}")
        self.checked_across_processes = True

    @cached_property
    def placed_arguments(self) -> PlacedArguments:
        """The arguments that were moved to the shardings that the program takes."""
        unread: list[int] = []
        if not self.of_jax.get("keep_unused") and isinstance(self.mesh, Mesh) and not self.mesh.is_multi_process:
            used = compat.inputs_used(self.traced.jaxpr, [True] * len(self.traced.out_avals))
            unread = [leaf for leaf, is_used in enumerate(used) if not is_used]
        return PlacedArguments(self.function, self.leaf_names, self.donated_leaves, unread)

    @property
    def leaf_names(self) -> list[str]:
        """The path of each leaf of the arguments."""
        graph = self.completion.assignment.graph
        return [graph.first_names[v] for v in graph.inputs]

    @property
    def donated_leaves(self) -> tuple[int, ...]:
        """Indices of the donated leaves."""
        return self.completion.donated_leaves

    def _refuse_deleted(self, leaves: Sequence[Any]) -> None:
        names = list(self.completion.assignment.graph.names)
        deleted = [names[i] for i in self.donated_leaves if _is_deleted(leaves[i])]
        raise ShardingError(
            f"{self.function}(...)",
            found=[f"{name} was donated to an earlier call and deleted" for name in deleted[:8]],
            required="arrays that have not been donated yet",
            fix="pass the result of that call",
        )

    def refuse_abstract(self, leaves: Sequence[Any]) -> None:
        """Raises for described devices, and for abstract arrays."""
        names = list(self.completion.assignment.graph.names)
        found = [f"{n} is a ShapeDtypeStruct" for n, x in zip(names, leaves, strict=False) if is_abstract(x)][:8]
        required = "concrete arrays"
        if isinstance(self.mesh, AbstractMesh):
            found, required = ["a mesh over described devices"], "real devices"
        if found:
            fix = [f"{self.function}.complete(...)", f"{self.function}.lower(...)"]
            raise ShardingError(f"{self.function}(...)", found=found, required=required, fix=fix)

    @cached_property
    def in_shardings(self) -> tuple[NamedSharding | None, ...]:
        """The sharding of each argument leaf; None where XLA chooses."""
        return self._shardings(self.completion.assignment.graph.inputs, self.memory_kinds)

    @cached_property
    def in_formats(self) -> tuple[Any, ...]:
        """The same, as a `Format` where a layout is asked for."""
        return with_layouts(self.in_shardings, self.layouts[0])

    @cached_property
    def out_shardings(self) -> tuple[NamedSharding | None, ...]:
        """The sharding of each result leaf; None where XLA chooses."""
        graph = self.completion.assignment.graph
        return self._shardings(graph.outputs, graph.output_memory_kinds)

    @cached_property
    def memory_kinds(self) -> tuple[str | None, ...]:
        """The kind of memory of each argument leaf; None is the device's."""
        graph = self.completion.assignment.graph
        return tuple(graph.memory_kinds.get(v) for v in graph.inputs)

    def _shardings(self, values: Sequence[int], kinds: Sequence[str | None]) -> tuple[NamedSharding | None, ...]:
        return tuple(self._sharding(v, kind) for v, kind in zip(values, kinds, strict=True))

    def _sharding(self, value: int, kind: str | None) -> NamedSharding | None:
        a = self.completion.assignment
        if a.specs[value].is_open and not self.constrained and kind is None:
            return None
        spec = self.completion.boundary(value)
        key = spec, len(a.graph.shapes[value]), kind
        if key not in self.shardings:
            self.shardings[key] = NamedSharding(self.mesh, spec, memory_kind=kind)
        return self.shardings[key]

    def reuse_argument_shardings(self, leaves: Sequence[Any]) -> None:
        """Gives results the very sharding objects of the arguments, where these are equal.

        `jax.jit` compares each argument's sharding with that of the first call; comparing an object with itself is
        fastest.
        """
        for leaf, v in zip(leaves, self.completion.assignment.graph.inputs, strict=True):
            theirs = committed_sharding(leaf, self.mesh)
            if not isinstance(theirs, NamedSharding) or theirs.mesh is not self.mesh:
                continue
            spec, ndim = self.completion.boundary(v), len(self.completion.assignment.graph.shapes[v])
            ours = NamedSharding(self.mesh, spec)
            if theirs.memory_kind == ours.memory_kind and theirs.is_equivalent_to(ours, ndim):
                self.shardings.setdefault((spec, ndim, None), theirs)

    def flat(self, *, inside: bool = False) -> Callable[..., list[Any]]:
        """The program as a function of flat arrays; `inside` another trace, its arguments are constrained too."""
        jaxpr = self.traced.jaxpr
        if self.constrained:
            over = abstract(with_auto_axes(self.mesh))
            with tracing.tracing_context():  # as the program was: some equations are traced anew
                jaxpr = constrain(jaxpr, self.completion.assignment, over, inputs=inside)
            if self.on_rewritten is not None:
                self.on_rewritten()
        evaluate = compat.jaxpr_fun(jaxpr)

        over = with_auto_axes(self.mesh)
        asked = self.in_shardings if inside and not self.constrained else [None] * len(self.in_shardings)
        placed = [None if one is None else NamedSharding(over, one.spec) for one in asked]

        def constrained(*leaves: Any) -> list[Any]:
            pairs = zip(leaves, placed, strict=True)
            return evaluate(*(x if s is None else jax.lax.with_sharding_constraint(x, s) for x, s in pairs))

        run: Any = constrained
        explicit = tuple(n for n, t in zip(self.mesh.axis_names, self.mesh.axis_types, strict=True) if t is _EXPLICIT)
        if explicit:
            specs = [P() if one is None else limited_to(one.spec, explicit) for one in self.out_shardings]
            run = jax.sharding.auto_axes(run, axes=explicit, out_sharding=specs)

        run.__name__ = run.__qualname__ = self.function
        return run

    @cached_property
    def flat_jit(self) -> Any:
        """`jax.jit` of the program on flat arrays; other shapes or dtypes raise ArgumentMismatch."""
        with self.lock:  # JAX compiles once for all threads that call one function
            if (found := vars(self).get("flat_jit")) is None:
                found = vars(self)["flat_jit"] = self._jit_of_leaves(range(len(self.in_shardings)))
            return found

    def _jit_of_leaves(self, order: Sequence[int]) -> Any:
        """`jax.jit` of the program on flat arrays that come in this order."""
        run, places = self.flat(), {leaf: place for place, leaf in enumerate(order)}
        expected = [(a.shape, a.dtype, getattr(a, "weak_type", False)) for a in self.traced.jaxpr.in_avals]

        def checked(*given: Any) -> list[Any]:
            leaves = [given[places[leaf]] for leaf in range(len(given))]
            if [leaf_key(x)[:3] for x in leaves] != expected:
                raise ArgumentMismatch
            return run(*leaves)

        checked.__name__ = checked.__qualname__ = self.function
        names = self.leaf_names
        vars(checked)["__signature__"] = signature_of([names[leaf] for leaf in order])
        return jax.jit(
            checked,
            donate_argnums=tuple(places[leaf] for leaf in self.donated_leaves),
            in_shardings=tuple(self.in_formats[leaf] for leaf in order),
            out_shardings=list(with_layouts(self.out_shardings, self.layouts[1])),
            **self.of_jax,
        )

    @cached_property
    def nested_jit(self) -> Callable[..., list[Any]]:
        """`jax.jit` of the program for calls inside another trace."""
        return jax.jit(constrained_inside(self.flat(inside=True), *self.layouts), **self.of_jax)

    def stage(self, call: Arguments) -> Any:
        """The program that a call runs as a `jax.stages.Traced` of the arguments that are not static.

        It returns the result or, if it updates mutable arguments, the result and the list of their new values.
        """
        # Not the arrays: their shardings may differ from the in_shardings, as a call transfers them first.
        avals = tracing.abstract_leaves(call.leaves, call.leaf_names, self.function)
        if isinstance(self.mesh, Mesh):  # as in a call, so that both compile once
            avals = [_on_mesh(aval, sharding) for aval, sharding in zip(avals, self.in_shardings, strict=True)]
        else:
            avals = tracing.in_memory(avals, self.in_shardings)
        out_tree = self.traced.out_tree
        if updated := self.traced.updated:
            out_tree = jax.tree.structure((jax.tree.unflatten(out_tree, range(out_tree.num_leaves)), list(updated)))
        order, in_tree = jax.tree.flatten(call.as_called(range(len(avals))))
        jitted = self.flat_jit if order == [*range(len(avals))] else self._jit_of_leaves(order)
        return _with_trees(jitted.trace(*(avals[leaf] for leaf in order)), in_tree, out_tree)

    @property
    def result_shapes(self) -> Any:
        """ShapeDtypeStructs of the result."""
        tree = self.traced.out_tree
        pairs = list(zip(self.traced.out_avals, self.out_shardings, strict=True))[: tree.num_leaves]
        return jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in pairs])


def _with_trees(traced: Any, in_tree: Any, out_tree: Any) -> Any:
    """A `jax.stages.Traced` of a function of flat arrays, as one of pytrees.

    Args:
        traced: of the function.
        in_tree: structure of the positional and keyword arguments, a pair.
        out_tree: structure of the result.
    """
    new = copy.copy(traced)
    new._in_tree, new.out_tree = in_tree, out_tree
    return new


def _on_mesh(aval: jax.ShapeDtypeStruct, sharding: Sharding | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)


def _delete(moved: Mapping[int, Any], leaves: Sequence[Any]) -> None:
    """Deletes what was moved and donated, unless no result could use it: a call then leaves it as it is."""
    for i, x in moved.items():
        if isinstance(x, jax.Array) and _is_deleted(leaves[i]):
            x.delete()


def _is_deleted(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.is_deleted()
