"""`sharding.plan`: the search for a mesh and the annotations that make a step fast within a memory limit.

Each mesh is searched by itself (`mesh_search.py`). The best meshes get annotations (`plan_annotations.py`), and the
cheapest completion wins, with a few other specs tried for each of its annotations (`plan_polish.py`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..completion import Completion
from ..cost import Topology
from ..cost.topology import topology_of_sizes
from ..errors import ShardingError
from ..hardware import Devices, parse
from ..jit.jit import jit
from ..mesh import mesh as mesh_of
from ..spec import sizes_text
from .algorithms import check_algorithm
from .graph_problem import GraphProblem, of_graph
from .mesh_search import MeshPlan, MeshSearch, SearchOptions
from .parallel_plan import Candidate, Plan
from .plan_annotations import Annotated, rank, score

AXIS_NAMES: tuple[str, ...] = ("x", "y", "z")
"""Of the meshes that are tried, as JAX's documentation names them."""
MOST_MESHES = 24
"""Meshes that are tried, at most."""
ANNOTATED = 3
"""The best meshes, whose plans are written as annotations and completed."""


def plan(
    step: Callable[..., Any],
    *args: Any,
    devices: Devices | str,
    mesh: Mapping[str, int] | None = None,
    algorithm: str = "auto",
    memory_bytes: float | None = None,
    seconds: float = 60,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Plan:
    """Finds a mesh and the annotations with which a step is estimated to take least time, before anything compiles.

    Args:
        step: a function, or one made by `sharding.jit`, whose options such as `donate_argnums` hold. What it annotates
            is kept.
        *args: its arguments, or ShapeDtypeStructs.
        devices: to plan for, such as `"v5p:8x8x8"` or `"h100:64x8"`; they need not be attached.
        mesh: axis -> size, major axis first. Default: meshes of up to three axes `x`, `y`, `z` are tried.
        algorithm: a key of `planner.ALGORITHMS`, or "auto".
        memory_bytes: limit on peak memory per device. Default: what the chip offers to programs.
        seconds: after which no other mesh is tried. Ctrl-C ends the search, too; the best plan so far is returned.
        seed: of random decisions.
        on_progress: called with a line of text for each mesh.
        **kwargs: keyword arguments of the step.

    Raises:
        ShardingError: unknown devices or algorithm, a mesh of another number of devices, a limit of 0, or no plan fits;
            the message has the smallest peak found, what fills it, and what would lower it.

    Example:
        >>> import jax
        >>> import sharding
        >>> def step(w, x):
        ...     return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
        >>> w, x = jax.ShapeDtypeStruct((256, 256), "float32"), jax.ShapeDtypeStruct((1 << 20, 256), "float32")
        >>> plan = sharding.plan(step, w, x, devices="h100:1x8")
        >>> dict(plan.axes), dict(plan.annotations)
        ({'x': 8}, {'x': P('x',)})
    """
    asked = f"sharding.plan(..., devices={str(devices)!r}, memory_bytes={memory_bytes})"
    on = parse(devices) if isinstance(devices, str) else devices
    check_algorithm(algorithm)
    limit = _limit(memory_bytes, on, asked)
    if not seconds > 0:
        raise ShardingError(f"sharding.plan(seconds={seconds})", required="a positive number of seconds")
    options = SearchOptions(
        devices=on, algorithm=algorithm, limit=limit, deadline=time.monotonic() + seconds, seed=seed
    )
    search = _Search(
        step=_jitted(step),
        args=args,
        kwargs=kwargs,
        options=options,
        on_progress=on_progress or (lambda text: None),
    )
    found = search.run([dict(mesh)] if mesh is not None else list(_meshes(on)))
    if not found:
        assert search.smallest is not None
        raise search.smallest.too_large(asked)
    return search.plan(found)


def problem_of(
    step: Callable[..., Any], *args: Any, devices: Devices | str, mesh: Mapping[str, int], **kwargs: Any
) -> GraphProblem:
    """The problem that `sharding.plan` solves for one mesh.

    Args:
        step: as for `sharding.plan`.
        *args: likewise.
        devices: likewise.
        mesh: axis -> size, major axis first.
        **kwargs: keyword arguments of the step.

    Raises:
        ShardingError: unknown devices, or a mesh of another number of them.

    Example:
        >>> import jax
        >>> from sharding import planner
        >>> x = jax.ShapeDtypeStruct((512, 512), "float32")
        >>> of = planner.problem_of(lambda x: x @ x, x, devices="h100:1x8", mesh={"x": 2, "y": 4})
        >>> planner.solve(of.problem).is_proven
        True
    """
    on = parse(devices) if isinstance(devices, str) else devices
    completion, over = _completed(_jitted(step), args, kwargs, mesh, on)
    graph = completion.assignment.graph
    return of_graph(graph, over, annotations=graph.annotations, name=f"{completion.name} on {sizes_text(mesh)}")


def _jitted(step: Any) -> Any:
    return step if hasattr(step, "complete") else jit(step)


def _completed(
    step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], axes: Mapping[str, int], devices: Devices
) -> tuple[Completion, Topology]:
    """The program over a mesh without a plan, and the mesh with its links."""
    with mesh_of(dict(axes), devices=devices):
        return step.complete(*args, **kwargs), topology_of_sizes(axes, devices, None)


def _limit(memory_bytes: float | None, on: Devices, asked: str) -> float:
    if memory_bytes is not None and not memory_bytes > 0:
        raise ShardingError(asked, found=f"memory_bytes={memory_bytes}", required="a positive number of bytes")
    own = on.chip.usable_memory_bytes or on.chip.memory_bytes or math.inf
    return float(own if memory_bytes is None else memory_bytes)


def _meshes(on: Devices) -> Iterator[dict[str, int]]:
    """Meshes of one, two and three axes, those with fewer axes first; on a torus those that fold onto it."""
    n, found = on.num_devices, 0
    divisors = [d for d in range(2, n + 1) if n % d == 0]
    for count in range(1, len(AXIS_NAMES) + 1):
        for sizes in itertools.product(divisors, repeat=count) if n > 1 else [(1,)] * (count == 1):
            axes = dict(zip(AXIS_NAMES, sizes, strict=False))
            folds = math.prod(sizes) == n and topology_of_sizes(axes, on, None).folds
            if folds and found < MOST_MESHES:
                found += 1
                yield axes


@dataclass(kw_only=True)
class _Search:
    step: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: SearchOptions
    on_progress: Callable[[str], None]
    smallest: MeshPlan | None = None
    """The one with the smallest peak, if none fits."""

    def run(self, meshes: Sequence[dict[str, int]]) -> list[MeshPlan]:
        """The best for each mesh that fits, the best one first."""
        found: list[MeshPlan] = []
        try:
            for k, axes in enumerate(meshes):
                if k and self.options.left <= 0:
                    break
                one = self.of_mesh(axes).best(max(1.0, self.options.left / (len(meshes) - k)))
                self.on_progress(f"{k + 1}/{len(meshes)} {sizes_text(axes)}: {one.costs}")
                if self.options.fits(one.costs):
                    found.append(one)
                elif self.smallest is None or one.costs.peak_bytes < self.smallest.costs.peak_bytes:
                    self.smallest = one
        except KeyboardInterrupt:
            if not found:
                raise
        return sorted(found, key=lambda one: score(one.costs))

    def of_mesh(self, axes: dict[str, int]) -> MeshSearch:
        """The search for one mesh."""
        completion, on = _completed(self.step, self.args, self.kwargs, axes, self.options.devices)
        return MeshSearch(axes=axes, completion=completion, on=on, options=self.options)

    def plan(self, found: Sequence[MeshPlan]) -> Plan:
        """The cheapest plan of the best meshes."""
        annotated: list[tuple[MeshPlan, Annotated]] = []
        try:
            for one in found[:ANNOTATED]:
                annotated.append((one, one.annotated()))
                self.on_progress(f"{sizes_text(one.search.axes)} with annotations: {annotated[-1][1].costs}")
                if self.options.left <= 0:
                    break
        except KeyboardInterrupt:
            if not annotated:
                raise
        best, result = min(annotated, key=lambda pair: rank(pair[1].costs, self.options.fits))
        result, next_best = best.polish().run(result)
        rest = [
            Candidate(axes=tuple(one.search.axes.items()), costs=one.costs, num_annotations=0)
            for one in found
            if one is not best
        ]
        return best.plan(result, next_best, rest)
