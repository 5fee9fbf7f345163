"""One completed program and its compiled forms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from . import arguments, compat, processes, tracing
from .completion import Completion
from .constrain import constrain
from .errors import ShardingError
from .tracing import Traced


class OtherArguments(Exception):
    """A program was called with arguments that it was not made for."""


@dataclass(eq=False)
class Program:
    """A traced function with the completion that it is constrained to; compiles when it first runs."""

    function: str
    mesh: Mesh | AbstractMesh
    traced: Traced
    completion: Completion
    in_tree: Any
    donated: tuple[int, ...]
    """The arguments whose memory the result may take."""
    constrained: bool
    """Whether every value is constrained; otherwise the annotations alone are."""
    places: dict[tuple[P, int], NamedSharding] = field(default_factory=dict)
    """(spec, number of dims) -> the one sharding that stands for it."""
    compared: bool = False
    """Whether every process is known to run this program."""

    def accepts(self, leaves: Sequence[Any]) -> bool:
        """Whether placed arrays lie exactly as this program takes its arguments."""
        return all(
            have is None or (want is not None and have.is_equivalent_to(want, len(leaf.shape)))
            for leaf, want in zip(leaves, self.in_shardings, strict=True)
            for have in [arguments.placed(leaf, self.mesh)]
        )

    def unplaced(self, leaves: Sequence[Any]) -> tuple[int, ...]:
        """The leaves that have to be moved before the program takes them.

        Moving them here, not inside `jax.jit`, lets it see every call alike: it would compile once for arrays that
        come from outside and once more for those that it made itself.
        """
        return tuple(i for i, (x, want) in enumerate(zip(leaves, self.in_shardings, strict=True)) if moves(x, want))

    def run(self, leaves: list[Any], unplaced: tuple[int, ...]) -> Any:
        """The result for arrays on real devices, or for tracers.

        Raises:
            ShardingError: described devices, or a ShapeDtypeStruct in place of an array.
        """
        traced = self.traced.closes_over_tracers or any(isinstance(x, compat.Tracer) for x in leaves)
        if traced or (isinstance(self.mesh, AbstractMesh) and compat.in_trace()):
            return jax.tree.unflatten(self.traced.out_tree, self.nested(*leaves))
        self.refuse_abstract(leaves)
        if any(_is_deleted(leaves[i]) for i in self.donated_leaves):
            self._refuse_deleted(leaves)
        first = not self.compared
        if first:
            self._compare()
        if unplaced:
            wanted = [self.in_shardings[i] for i in unplaced]
            for i, x in zip(unplaced, jax.device_put([leaves[i] for i in unplaced], wanted), strict=True):
                leaves[i] = x
        with processes.compiling() if first else contextlib.nullcontext():
            return jax.tree.unflatten(self.traced.out_tree, self.compiled(*leaves))

    def run_placed(self, leaves: list[Any]) -> Any:
        """The result for arrays that lie on devices by choice, likely as this program wants them.

        Raises:
            OtherArguments: this program takes another shape, dtype or sharding; nothing was run.
        """
        deleted = [leaves[i].is_deleted() for i in self.donated_leaves]  # a list: faster than a generator
        if any(deleted):
            self._refuse_deleted(leaves)
        try:
            return jax.tree.unflatten(self.traced.out_tree, self.compiled(*leaves))
        except ValueError as error:  # JAX compares shardings with in_shardings before it starts anything
            if any(leaves[i].is_deleted() for i in self.donated_leaves):
                raise
            raise OtherArguments from error

    def _compare(self) -> None:
        """Raises where another process is about to run another program: they would wait for each other for ever."""
        if isinstance(self.mesh, Mesh) and self.mesh.is_multi_process:
            avals = self.traced.jaxpr.in_avals
            shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals]
            processes.agree({"program": self.compiled.lower(*shapes).as_text()}, about=f"compile {self.function}")
        self.compared = True

    @cached_property
    def donated_leaves(self) -> tuple[int, ...]:
        """The leaves of the donated arguments."""
        ranges = tracing.ranges(self.in_tree)
        return tuple(leaf for i in self.donated for leaf in ranges[i])

    def _refuse_deleted(self, leaves: Sequence[Any]) -> None:
        names = list(self.completion.assignment.graph.names)
        deleted = [names[i] for i in self.donated_leaves if _is_deleted(leaves[i])]
        raise ShardingError(
            f"{self.function}(...)",
            there=[f"{name} was donated to a call before and is gone" for name in deleted[:8]],
            must="an array is passed where it is donated only once",
            fix="pass what came back from that call",
        )

    def refuse_abstract(self, leaves: Sequence[Any]) -> None:
        """Raises where there is nothing to run on, or nothing to run."""
        names = list(self.completion.assignment.graph.names)
        there = [f"{n} is a ShapeDtypeStruct" for n, x in zip(names, leaves, strict=False) if _is_abstract(x)][:8]
        must = "a program runs on arrays"
        if isinstance(self.mesh, AbstractMesh):
            there, must = ["a mesh over described devices"], "a program runs on real devices"
        if there:
            fix = [f"{self.function}.complete(...)", f"{self.function}.lower(...)"]
            raise ShardingError(f"{self.function}(...)", there=there, must=must, fix=fix)

    @cached_property
    def in_shardings(self) -> tuple[NamedSharding | None, ...]:
        """Per argument leaf where it has to lie; None where XLA chooses."""
        return self._shardings(self.completion.assignment.graph.inputs)

    @cached_property
    def out_shardings(self) -> tuple[NamedSharding | None, ...]:
        """Per result leaf where it comes to lie; None where XLA chooses."""
        return self._shardings(self.completion.assignment.graph.outputs)

    def _shardings(self, values: Sequence[int]) -> tuple[NamedSharding | None, ...]:
        return tuple(self._sharding(v) for v in values)

    def _sharding(self, value: int) -> NamedSharding | None:
        a = self.completion.assignment
        if a.specs[value].is_open and not self.constrained:
            return None
        spec = self.completion.boundary(value)
        key = spec, len(a.graph.shapes[value])
        if key not in self.places:
            self.places[key] = NamedSharding(self.mesh, spec)
        return self.places[key]

    def adopt(self, leaves: Sequence[Any]) -> None:
        """Has results come back with the very shardings that arguments come with, where these are equal.

        At each call `jax.jit` compares every argument's sharding with that of the first call; one and the same object
        is equal at once.
        """
        for leaf, v in zip(leaves, self.completion.assignment.graph.inputs, strict=True):
            theirs = arguments.placed(leaf, self.mesh)
            if not isinstance(theirs, NamedSharding) or theirs.mesh is not self.mesh:
                continue
            spec, ndim = self.completion.boundary(v), len(self.completion.assignment.graph.shapes[v])
            ours = NamedSharding(self.mesh, spec)
            if theirs.memory_kind == ours.memory_kind and theirs.is_equivalent_to(ours, ndim):
                self.places.setdefault((spec, ndim), theirs)

    def flat(self, *, inside: bool = False) -> Callable[..., list[Any]]:
        """The program as a function of flat arrays; `inside` another one, its arguments are constrained too."""
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
    def compiled(self) -> Any:
        """The program by `jax.jit`, on flat arrays of its own shapes and dtypes: others raise OtherArguments."""
        run = self.flat()
        wanted = [(a.shape, a.dtype, getattr(a, "weak_type", False)) for a in self.traced.jaxpr.in_avals]

        def checked(*leaves: Any) -> list[Any]:
            if [tracing.facts(x)[:3] for x in leaves] != wanted:
                raise OtherArguments
            return run(*leaves)

        checked.__name__ = checked.__qualname__ = self.function
        return jax.jit(
            checked,
            donate_argnums=self.donated_leaves,
            in_shardings=self.in_shardings,
            out_shardings=list(self.out_shardings),
        )

    @cached_property
    def nested(self) -> Callable[..., list[Any]]:
        """The program for use inside another one that is being traced."""
        return jax.jit(self.flat(inside=True))

    @cached_property
    def structured(self) -> Any:
        """The program on the user's own pytrees, for `trace` and `lower`."""
        run = self.flat()

        def whole(*args: Any) -> Any:
            return jax.tree.unflatten(self.traced.out_tree, run(*jax.tree.leaves(args)))

        whole.__name__ = whole.__qualname__ = self.function
        return jax.jit(
            whole,
            in_shardings=jax.tree.unflatten(self.in_tree, self.in_shardings),
            out_shardings=jax.tree.unflatten(self.traced.out_tree, self.out_shardings),
            donate_argnums=self.donated,
        )


def moves(x: Any, want: Sharding | None) -> bool:
    """Whether an array or number does not lie where it is wanted."""
    if want is None or _is_abstract(x) or isinstance(x, compat.Tracer):
        return False
    return not (compat.is_committed(x) and x.sharding.is_equivalent_to(want, x.ndim))


def _is_deleted(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.is_deleted()


def _is_abstract(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)
