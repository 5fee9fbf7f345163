"""`sharding.plan`: the search for a mesh and the annotations that make a step fast within a memory limit.

For each mesh the program becomes a problem (`graph_problem.py`), which a solver decides; what it wants is costed as
the completed program is: by the ledger, the memory report and the estimate. If the peak exceeds the limit, the
problem's own limit falls in proportion. The best meshes get annotations (`plan_annotations.py`), and the cheapest
completion wins, with a few other specs tried for each of its annotations (`plan_polish.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..completion import Completion
from ..cost import Topology
from ..cost.topology import topology_of_sizes
from ..display.units import bytes_text
from ..errors import ShardingError
from ..explain.memory_report import memory
from ..explain.program_costs import Costs, costs
from ..hardware import Devices, Platform, parse
from ..jit.jit import jit
from ..mesh import mesh as mesh_of
from ..propagation import Assignment
from ..spec import Spec, sizes_text, to_partition_spec
from . import plan_remat
from .algorithms import check_algorithm, solve
from .graph_problem import MICRO, GraphProblem, of_graph
from .parallel_plan import Candidate, Plan
from .plan_annotations import Annotated, AnnotationSearch, rank, score
from .plan_polish import Polish
from .solution import Solution

AXIS_NAMES: tuple[str, ...] = ("x", "y", "z")
"""Of the meshes that are tried, as JAX's documentation names them."""
MOST_MESHES = 24
"""Meshes that are tried, at most."""
ANNOTATED = 3
"""The best meshes, whose plans are written as annotations and completed."""
HIDDEN: Mapping[Platform, tuple[float, ...]] = {"cpu": (0.0,), "tpu": (0.0,), "gpu": (0.0, 0.75)}
"""Parts of the collectives of parameters, gradients and other arguments that are taken to be hidden behind computation,
each of which gives a problem: XLA:GPU starts them early, but how early depends on the plan."""
MAX_LIMITS = 4
"""Limits of the problem that are tried until the completed program fits."""
LEAST_SECONDS = 2.0
"""That a solver gets, which it needs where it can't prove its choice."""
MARGIN = 0.97
"""What the limit falls by beyond the proportion."""


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
            is kept. What blocks under `jax.checkpoint(..., policy=remat.auto)` keep is part of the plan.
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
    search = _Search(
        step=_jitted(step),
        args=args,
        kwargs=kwargs,
        devices=on,
        algorithm=algorithm,
        limit=limit,
        deadline=time.monotonic() + seconds,
        seed=seed,
        on_progress=on_progress or (lambda text: None),
    )
    found = _of_recomputations(search, [dict(mesh)] if mesh is not None else list(_meshes(on)))
    if found is None:
        raise _nothing_fits(search, asked)
    return found


def _of_recomputations(search: _Search, meshes: Sequence[dict[str, int]]) -> Plan | None:
    """The best plan over what blocks under `remat.auto` keep; None if none fits."""
    with mesh_of(meshes[0], devices=search.devices):
        choices = plan_remat.ends(search.step, search.args, search.kwargs)
    best: Plan | None = None
    deadline = search.deadline
    try:
        for k, policies in enumerate(choices):
            search.policies, search.deadline = policies, deadline - search.left * (len(choices) - k - 1) / 2
            found = search.run(meshes)
            if not found:
                continue
            plan = search.plan(found)
            if best is None or score(plan.costs) < score(best.costs):
                best = plan
            if k and not search.is_interrupted and search.left > 0:
                best = min(best, search.fitted(plan), key=lambda plan: score(plan.costs))
            if search.is_interrupted or math.isinf(found[0].limit):  # nothing has to be given up for memory
                break
    except KeyboardInterrupt:
        if best is None:
            raise
    return best


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


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The best that a solver found for one mesh."""

    axes: dict[str, int]
    completion: Completion
    on: Topology
    of: GraphProblem
    solution: Solution
    limit: float
    """On the problem's memory; inf if the program fits without one."""
    wanted: tuple[Spec | None, ...]
    assignment: Assignment
    """The program sharded as it wants."""
    costs: Costs


@dataclass(kw_only=True)
class _Search:
    step: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    devices: Devices
    algorithm: str
    limit: float
    deadline: float
    seed: int
    on_progress: Callable[[str], None]
    policies: plan_remat.Policies = field(default_factory=dict)
    """What blocks under `remat.auto` keep."""
    is_interrupted: bool = False
    """By Ctrl-C."""
    smallest: _Found | None = None
    """The one with the smallest peak, if none fits."""

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def fits(self, found: Costs) -> bool:
        return found.peak_bytes <= self.limit

    def run(self, meshes: Sequence[dict[str, int]]) -> list[_Found]:
        """The best for each mesh that fits, the best one first."""
        found: list[_Found] = []
        try:
            for k, axes in enumerate(meshes):
                if k and self.left <= 0:
                    break
                one = self.best(axes, max(1.0, self.left / (len(meshes) - k)))
                self.on_progress(f"{k + 1}/{len(meshes)} {sizes_text(axes)}: {one.costs}")
                if self.fits(one.costs):
                    found.append(one)
                elif self.smallest is None or one.costs.peak_bytes < self.smallest.costs.peak_bytes:
                    self.smallest = one
        except KeyboardInterrupt:
            self.is_interrupted = True
            if not found:
                raise
        return sorted(found, key=lambda one: score(one.costs))

    def best(self, axes: dict[str, int], seconds: float) -> _Found:
        """The best for one mesh; what exceeds the limit least if nothing fits."""
        with plan_remat.tracing(self.policies):
            completion, on = _completed(self.step, self.args, self.kwargs, axes, self.devices)
        shares = HIDDEN[self.devices.chip.platform]
        found = [self.solved(axes, completion, on, hidden, seconds / len(shares)) for hidden in shares]
        return min(found, key=lambda one: rank(one.costs, self.fits))

    def solved(
        self, axes: dict[str, int], completion: Completion, on: Topology, hidden: float, seconds: float
    ) -> _Found:
        """The best where a part of the collectives of arguments is hidden behind computation."""
        graph = completion.assignment.graph
        of = of_graph(graph, on, annotations=graph.annotations, hidden=hidden)
        best: _Found | None = None
        limit = math.inf
        for _ in range(MAX_LIMITS):
            try:
                solution = solve(of.problem, self.algorithm, limit, max(seconds / MAX_LIMITS, LEAST_SECONDS), self.seed)
            except ShardingError:
                if best is None:
                    raise
                break
            now = self.costed(axes, completion, on, of, solution, limit)
            best = now if best is None else min(best, now, key=lambda one: rank(one.costs, self.fits))
            if self.fits(now.costs) or limit <= of.problem.least_peak_bytes:
                break
            limit = max(of.problem.least_peak_bytes, MARGIN * solution.peak_bytes * self.limit / now.costs.peak_bytes)
        assert best is not None
        return best

    def costed(
        self,
        axes: dict[str, int],
        completion: Completion,
        on: Topology,
        of: GraphProblem,
        solution: Solution,
        limit: float,
    ) -> _Found:
        assignment = completion.assignment
        wanted = tuple(of.sharding(v, solution.choice) for v in range(len(assignment.specs)))
        specs = tuple(spec or own for spec, own in zip(wanted, assignment.specs, strict=True))
        assignment = dataclasses.replace(assignment, specs=specs)
        return _Found(
            axes=axes,
            completion=completion,
            on=on,
            of=of,
            solution=solution,
            limit=limit,
            wanted=wanted,
            assignment=assignment,
            costs=self.costs(completion, on)(assignment),
        )

    def costs(self, completion: Completion, on: Topology) -> Callable[[Assignment], Costs]:
        return partial(costs, on=on, donated=completion.donated_leaves, platform=self.devices.chip.platform)

    def plan(self, found: Sequence[_Found]) -> Plan:
        """The cheapest plan of the best meshes."""
        annotated: list[tuple[_Found, Annotated]] = []
        try:
            for one in found[:ANNOTATED]:
                annotated.append((one, self.annotated(one)))
                self.on_progress(f"{sizes_text(one.axes)} with annotations: {annotated[-1][1].costs}")
                if self.left <= 0:
                    break
        except KeyboardInterrupt:
            self.is_interrupted = True
            if not annotated:
                raise
        best, result = min(annotated, key=lambda pair: rank(pair[1].costs, self.fits))
        polish = Polish(
            of=best.of, choice=best.solution.choice, search=self.search_of(best), fits=self.fits, deadline=self.deadline
        )
        result, next_best = polish.run(result)
        graph = best.completion.assignment.graph
        rest = [
            Candidate(axes=tuple(one.axes.items()), costs=one.costs, num_annotations=0)
            for one in found
            if one is not best
        ]
        first = Candidate(axes=tuple(best.axes.items()), costs=result.costs, num_annotations=len(result.annotations))
        return Plan(
            name=best.completion.name,
            devices=str(self.devices),
            axes=best.axes,
            annotations=result.annotations,
            arguments=tuple(
                (graph.first_names.get(v, f"argument {k}"), to_partition_spec(result.assignment.boundary_spec(v)))
                for k, v in enumerate(graph.inputs)
            ),
            costs=result.costs,
            memory_bytes=self.limit,
            algorithm=best.solution.algorithm,
            bound_seconds=best.solution.bound / MICRO,
            planned_seconds=best.solution.cost / MICRO,
            remat=self.policies,
            next_best=next_best,
            candidates=(first, *rest),
        )

    def fitted(self, plan: Plan) -> Plan:
        """The plan with what its blocks can keep within the limit, if that is better."""
        with mesh_of(dict(plan.axes), devices=self.devices):
            step = self.step.with_plan(dataclasses.replace(plan, remat={}))
            policies = None if self.kwargs else plan_remat.fitted(step, self.args, self.limit)
            if policies is None:
                return plan
            with plan_remat.tracing(policies):
                completion = step.complete(*self.args)
        now = self.costs(completion, topology_of_sizes(plan.axes, self.devices, None))(completion.assignment)
        self.on_progress(f"{sizes_text(plan.axes)} with recomputation that fits: {now}")
        if rank(now, self.fits) >= rank(plan.costs, self.fits):
            return plan
        return dataclasses.replace(plan, remat=policies, costs=now)

    def annotated(self, one: _Found) -> Annotated:
        return self.search_of(one).run(one.costs.seconds, self.fits, self.deadline)

    def search_of(self, one: _Found) -> AnnotationSearch:
        return AnnotationSearch(
            base=one.completion.assignment,
            wanted=one.wanted,
            alike=one.of.node_of_value,
            costed=self.costs(one.completion, one.on),
        )


def _nothing_fits(search: _Search, asked: str) -> ShardingError:
    """What is missing: the smallest peak found, what fills it, and what would lower it."""
    assert search.smallest is not None
    one = search.smallest
    report = memory(one.assignment, donated=one.completion.donated_leaves, platform=search.devices.chip.platform)
    classes = {category: size for category, size in report.by_class.items() if size}
    activations = sum(size for category, size in classes.items() if "activations" in category)
    filled = ", ".join(f"{category} {bytes_text(size)}" for category, size in classes.items())
    return ShardingError(
        asked,
        found=[
            f"{bytes_text(one.costs.peak_bytes)} at the least, on mesh {sizes_text(one.axes)}",
            f"at its peak: {filled}",
        ],
        required=f"a plan within {bytes_text(int(search.limit))} per device",
        fix=[
            f"memory_bytes={one.costs.peak_bytes}",
            *(["jax.checkpoint(layer, policy=remat.auto) around each layer"] if activations > search.limit / 4 else []),
            "more devices",
            "a smaller batch",
        ],
    )
