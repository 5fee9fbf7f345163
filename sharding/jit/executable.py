"""A completed program and its jitted forms: on flat arrays, inside another trace, on pytrees."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from .. import compat
from ..completion import Completion
from ..distributed import consistency, heartbeat
from ..errors import ShardingError
from ..rewrite.constrain import constrain
from . import tracing
from .argument_shardings import committed_sharding
from .cache_key import leaf_key
from .placed_arguments import PlacedArguments
from .tracing import Traced


class ArgumentMismatch(Exception):
    """An executable was called with arguments of other shapes, dtypes or shardings than it was built for."""


@dataclass(eq=False)
class Executable:
    """A traced function constrained to its completion; compiles on the first call."""

    function: str
    mesh: Mesh | AbstractMesh
    traced: Traced
    completion: Completion
    in_tree: Any
    donated: tuple[int, ...]
    """Indices of the donated arguments."""
    constrained: bool
    """Whether every value is constrained, or only the annotated ones."""
    shardings: dict[tuple[P, int, str | None], NamedSharding] = field(default_factory=dict)
    """(spec, ndim, kind of memory) -> the one NamedSharding object used for it."""
    checked_across_processes: bool = False
    """Whether all processes are known to run this same program."""

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
        pairs = zip(leaves, self.in_shardings, strict=True)
        return tuple(i for i, (x, required) in enumerate(pairs) if needs_transfer(x, required))

    def run(self, leaves: list[Any], misplaced: tuple[int, ...]) -> Any:
        """Runs on arrays on real devices, or on tracers.

        Raises:
            ShardingError: described devices, or a ShapeDtypeStruct instead of an array.
        """
        traced = self.traced.closes_over_tracers or any(isinstance(x, compat.Tracer) for x in leaves)
        if traced or (isinstance(self.mesh, AbstractMesh) and compat.in_trace()):
            return jax.tree.unflatten(self.traced.out_tree, self.nested_jit(*leaves))
        self.refuse_abstract(leaves)
        if any(_is_deleted(leaves[i]) for i in self.donated_leaves):
            self._refuse_deleted(leaves)
        first = not self.checked_across_processes
        if first:
            self._check_across_processes()
        self.placed_arguments.move(leaves, misplaced, self.in_shardings)
        with heartbeat.reporting_compilation() if first else contextlib.nullcontext():
            return jax.tree.unflatten(self.traced.out_tree, self.flat_jit(*leaves))

    def run_committed(self, leaves: list[Any]) -> Any:
        """Runs on committed arrays that probably have the shardings this program takes.

        Raises:
            ArgumentMismatch: a shape, dtype or sharding differs; nothing was run.
        """
        deleted = [leaves[i].is_deleted() for i in self.donated_leaves]  # a list: faster than a generator
        if any(deleted):
            self._refuse_deleted(leaves)
        try:
            return jax.tree.unflatten(self.traced.out_tree, self.flat_jit(*leaves))
        except ValueError as error:  # JAX compares shardings with in_shardings before it starts anything
            if any(leaves[i].is_deleted() for i in self.donated_leaves):
                raise
            raise ArgumentMismatch from error

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
        graph = self.completion.assignment.graph
        names = [graph.first_names[v] for v in graph.inputs]
        return PlacedArguments(self.function, names, self.donated_leaves)

    @cached_property
    def donated_leaves(self) -> tuple[int, ...]:
        """Indices of the donated leaves."""
        leaf_ranges = tracing.leaf_ranges(self.in_tree)
        return tuple(leaf for i in self.donated for leaf in leaf_ranges[i])

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
        found = [f"{n} is a ShapeDtypeStruct" for n, x in zip(names, leaves, strict=False) if _is_abstract(x)][:8]
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
            abstract = self.mesh if isinstance(self.mesh, AbstractMesh) else self.mesh.abstract_mesh
            jaxpr = constrain(jaxpr, self.completion.assignment, abstract, inputs=inside)
        evaluate = compat.jaxpr_fun(jaxpr)

        def run(*leaves: Any) -> list[Any]:
            return evaluate(*leaves)

        run.__name__ = run.__qualname__ = self.function
        return run

    @cached_property
    def flat_jit(self) -> Any:
        """`jax.jit` of the program on flat arrays; other shapes or dtypes raise ArgumentMismatch."""
        run = self.flat()
        expected = [(a.shape, a.dtype, getattr(a, "weak_type", False)) for a in self.traced.jaxpr.in_avals]

        def checked(*leaves: Any) -> list[Any]:
            if [leaf_key(x)[:3] for x in leaves] != expected:
                raise ArgumentMismatch
            return run(*leaves)

        checked.__name__ = checked.__qualname__ = self.function
        return jax.jit(
            checked,
            donate_argnums=self.donated_leaves,
            in_shardings=self.in_shardings,
            out_shardings=list(self.out_shardings),
        )

    @cached_property
    def nested_jit(self) -> Callable[..., list[Any]]:
        """`jax.jit` of the program for calls inside another trace."""
        return jax.jit(self.flat(inside=True))

    @cached_property
    def pytree_jit(self) -> Any:
        """`jax.jit` of the program on the user's pytrees, for `trace` and `lower`."""
        run = self.flat()

        def on_pytrees(*args: Any) -> Any:
            return jax.tree.unflatten(self.traced.out_tree, run(*jax.tree.leaves(args)))

        on_pytrees.__name__ = on_pytrees.__qualname__ = self.function
        return jax.jit(
            on_pytrees,
            in_shardings=jax.tree.unflatten(self.in_tree, self.in_shardings),
            out_shardings=jax.tree.unflatten(self.traced.out_tree, self.out_shardings),
            donate_argnums=self.donated,
        )


def is_in_memory(x: Any, kind: str | None) -> bool:
    """Whether an argument is in a kind of memory, where None is the device's, or not placed yet."""
    if not (compat.is_committed(x) or _is_abstract(x)) or x.sharding is None:
        return True
    return x.sharding.memory_kind in ((kind,) if kind else (None, "device"))


def needs_transfer(x: Any, required: Sharding | None) -> bool:
    """Whether an array or number does not have the required sharding."""
    if required is None or _is_abstract(x) or isinstance(x, compat.Tracer):
        return False
    return not (compat.is_committed(x) and x.sharding.is_equivalent_to(required, x.ndim))


def _is_deleted(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.is_deleted()


def _is_abstract(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)
