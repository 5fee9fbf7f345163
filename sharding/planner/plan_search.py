"""`sharding.plan`: the search for a mesh and the annotations that make a step fast within a memory limit.

Each mesh is searched by itself (`mesh_search.py`), for the step and its versions in stages. The best ones get
annotations (`plan_annotations.py`), and the cheapest completion wins, with a few other specs tried for each of its
annotations (`plan_polish.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import PartitionSpec as P

from ..cost.topology import topology_of_sizes
from ..errors import ShardingError
from ..graph.places import is_of_recomputed
from ..hardware import Devices, parse
from ..jit.jit import jit
from ..mesh import mesh as mesh_of
from ..spec import sizes_text
from . import plan_remat
from .algorithms import check_algorithm
from .graph_problem import GraphProblem
from .mesh_search import MeshPlan, MeshSearch, SearchOptions
from .parallel_plan import Candidate, Plan
from .plan_annotations import Annotated, rank, score
from .plan_polish import NextBests
from .plan_stages import Staged
from .plan_version import Version
from .problem_builder import of_graph

ANNOTATED = 3
"""The best meshes, whose plans are written as annotations and completed."""
NEARLY, MOST_NEARLY = 1.25, 6
"""If no plan fits, those are written as annotations, with which they may fit, whose peak is up to so many times the
limit; and how many of them."""
MAX_FITS = 3
"""How often recomputation and annotations are fitted to each other."""
Item = tuple[Version, dict[str, int]]
"""A version of the step and a mesh to try it on."""

AXIS_NAMES: tuple[str, ...] = ("x", "y", "z")
"""Of the meshes that are tried, as JAX's documentation names them."""
MOST_MESHES, MOST_STAGED_MESHES = 24, 4
"""Meshes that are tried, at most, and those for each version in stages."""


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
    staged: Sequence[Staged] = (),
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
        staged: versions of the step in pipeline stages, which are planned for meshes that begin with their axis. The
            plan is of one of them if that is faster, or if `mesh` has their axis.
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
    search = _Search(options=options, on_progress=on_progress or (lambda text: None))
    versions = [Version(step=_jitted(step), args=args, kwargs=kwargs)]
    versions += [Version(step=_jitted(one.step), args=one.args, kwargs={}, stages=one.stages) for one in staged]
    items = [item for version in versions for item in _on_meshes(version, on, mesh)]
    in_stages = [item for item in items if item[0].stages is not None]
    found = _best(search, in_stages if mesh is not None and in_stages else items)
    if found is None:
        assert search.smallest is not None
        raise search.smallest.too_large(asked)
    return found


def _on_meshes(version: Version, on: Devices, given: Mapping[str, int] | None) -> Iterator[Item]:
    """A version of the step with each mesh to try it on: for stages those that begin with their axis."""
    first = {} if version.stages is None else {version.stages.axis: version.stages.count}
    if given is not None:
        if all(given.get(axis) == size for axis, size in first.items()):
            yield version, dict(given)
    elif on.num_devices % math.prod(first.values()) == 0:
        yield from ((version, axes) for axes in _meshes(on, first))


def _best(search: _Search, items: Sequence[Item]) -> Plan | None:
    """The best plan over versions and what their blocks under `remat.auto` keep; None if none fits."""
    ends = {id(version): version.ends(axes, search.options.devices) for version, axes in reversed(items)}
    rounds = [
        [(ends[id(version)][k], axes) for version, axes in items if k < len(ends[id(version)])]
        for k in range(max(map(len, ends.values())))
    ]
    best: Plan | None = None
    deadline = search.options.deadline
    try:
        for k, these in enumerate(rounds):
            search.until(deadline - search.options.left * (len(rounds) - k - 1) / 2)
            found = search.run_all(these) or search.nearly_fitting()
            if not found:
                continue
            plan = search.plan(found)
            if plan is not None and (best is None or score(plan.costs) < score(best.costs)):
                best = plan
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
    completion, over = Version(step=_jitted(step), args=args, kwargs=kwargs).completed(mesh, on)
    graph = completion.assignment.graph
    return of_graph(graph, over, annotations=graph.annotations, name=f"{completion.name} on {sizes_text(mesh)}")


def _jitted(step: Any) -> Any:
    return step if hasattr(step, "complete") else jit(step)


def _limit(memory_bytes: float | None, on: Devices, asked: str) -> float:
    if memory_bytes is not None and not memory_bytes > 0:
        raise ShardingError(asked, found=f"memory_bytes={memory_bytes}", required="a positive number of bytes")
    own = on.chip.usable_memory_bytes or on.chip.memory_bytes or math.inf
    return float(own if memory_bytes is None else memory_bytes)


def _meshes(on: Devices, first: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Meshes of one to three axes behind some, those with fewer axes first; on a torus those that fold onto it."""
    n, found = on.num_devices // math.prod(first.values()), 0
    divisors = [d for d in range(2, n + 1) if n % d == 0]
    for count in range(1, len(AXIS_NAMES) + 1):
        for sizes in itertools.product(divisors, repeat=count) if n > 1 else [(1,)] * (count == 1):
            axes = {**first, **dict(zip(AXIS_NAMES, sizes, strict=False))}
            folds = math.prod(sizes) == n and topology_of_sizes(axes, on, None).folds
            if folds and found < (MOST_STAGED_MESHES if first else MOST_MESHES):
                found += 1
                yield axes


@dataclass(kw_only=True)
class _Search:
    options: SearchOptions
    on_progress: Callable[[str], None]
    is_interrupted: bool = False
    """By Ctrl-C."""
    smallest: MeshPlan | None = None
    """The one with the smallest peak, if none fits."""
    nearly: list[MeshPlan] = field(default_factory=list)
    """Those that exceed the limit by little, of meshes on which none fits."""

    def until(self, deadline: float) -> None:
        self.options = dataclasses.replace(self.options, deadline=deadline)

    def run_all(self, items: Sequence[Item]) -> list[MeshPlan]:
        """The best for each mesh that fits, the best one first; versions in stages have half of the time."""
        whole = [item for item in items if item[0].stages is None]
        staged = [item for item in items if item[0].stages is not None]
        found: list[MeshPlan] = []
        for these, share in ((whole, 0.5 if staged else 1.0), (staged, 1.0)):
            if these and not self.is_interrupted:
                found += self.run(these, share * self.options.left)
        return sorted(found, key=lambda one: score(one.costs))

    def run(self, items: Sequence[Item], seconds: float) -> list[MeshPlan]:
        """The best for each version on a mesh that fits."""
        found: list[MeshPlan] = []
        until = time.monotonic() + seconds
        try:
            for k, (version, axes) in enumerate(items):
                left = until - time.monotonic()
                if k and left <= 0:
                    break
                completion, on = version.completed(axes, self.options.devices)
                one = MeshSearch(
                    version=version.without_arrays(), axes=axes, completion=completion, on=on, options=self.options
                )
                best = one.best(max(1.0, left / (len(items) - k)))
                self.on_progress(f"{k + 1}/{len(items)} {version.name(axes)}: {best.costs}")
                if self.options.fits(best.costs):
                    found.append(best)
                else:
                    self.too_large(best)
                    limit = NEARLY * self.options.limit
                    self.nearly += [tried for tried in one.tried if tried.costs.peak_bytes <= limit]
        except KeyboardInterrupt:
            self.is_interrupted = True
            if not found:
                raise
        return found

    def too_large(self, one: MeshPlan) -> None:
        """Remembers a plan that does not fit if none has a smaller peak."""
        if self.smallest is None or one.costs.peak_bytes < self.smallest.costs.peak_bytes:
            self.smallest = one

    def nearly_fitting(self) -> list[MeshPlan]:
        """The best plans that may fit with what propagation infers from their annotations."""
        found = {(one.costs.seconds, one.costs.peak_bytes): one for one in self.nearly}
        self.nearly.clear()
        return sorted(found.values(), key=lambda one: score(one.costs))[:MOST_NEARLY]

    def plan(self, found: Sequence[MeshPlan]) -> Plan | None:
        """The cheapest plan of the best meshes; None if none fits with annotations."""
        annotated: list[tuple[MeshPlan, Annotated]] = []
        try:
            for one in found:
                least = min((rank(now.costs, self.options.fits) for _, now in annotated), default=(1, 0.0))
                is_enough = len(annotated) >= ANNOTATED
                is_late = self.options.left <= 0 and (is_enough or least <= rank(one.costs, self.options.fits))
                if is_late or (is_enough and not least[0]):
                    break
                slack = 1.0 if self.options.fits(one.costs) else NEARLY
                annotated.append((one, one.annotated(slack)))
                name = one.search.version.name(one.search.axes)
                self.on_progress(f"{name} with annotations: {annotated[-1][1].costs}")
        except KeyboardInterrupt:
            self.is_interrupted = True
            if not annotated:
                raise
        annotated.sort(key=lambda pair: rank(pair[1].costs, self.options.fits))
        best, result = annotated[0]
        if not self.options.fits(result.costs):
            self.too_large(best.with_annotations(result))
            return None
        best, result, next_best = self.polished(annotated)
        rest = [
            Candidate(
                axes=tuple(one.search.axes.items()),
                stages=one.search.version.stages,
                costs=one.costs.all(),
                num_annotations=0,
            )
            for one in found
            if one is not best
        ]
        return self.fitted(best.plan(result, next_best, rest), best.search)

    def polished(self, annotated: Sequence[tuple[MeshPlan, Annotated]]) -> tuple[MeshPlan, Annotated, NextBests]:
        """The best plan after its last changes, or another that wants less than this one takes, after its own."""
        (best, result), *others = annotated
        result, next_best = best.polish().run(result)
        for one, found in others:
            if self.is_interrupted or self.options.left <= 0:
                break
            if rank(one.costs, self.options.fits) < rank(result.costs, self.options.fits):
                changed, its_next_best = one.polish().run(found)
                if rank(changed.costs, self.options.fits) < rank(result.costs, self.options.fits):
                    best, result, next_best = one, changed, its_next_best
        return best, result, next_best

    def fitted(self, plan: Plan, search: MeshSearch) -> Plan:
        """The plan with what its blocks can keep within the limit, if that is faster."""
        version, options = search.version, self.options
        if not plan.remat or plan.keeps_everything or version.kwargs:
            return plan
        for _ in range(MAX_FITS):
            if self.is_interrupted or options.left <= 0:
                break
            policies = self.policies(plan, version)
            if policies is None or policies == plan.remat:
                break
            found = self.planned_anew(plan, search, dataclasses.replace(version, policies=policies))
            self.on_progress(f"{version.name(plan.axes)} with recomputation that fits: {found.costs}")
            if not options.fits(found.costs) or found.costs.seconds >= plan.costs.seconds:
                break
            plan = found
        return plan

    def policies(self, plan: Plan, version: Version) -> plan_remat.Policies | None:
        """What the blocks of a plan can keep within the limit; None if that is not found."""
        with mesh_of(dict(plan.axes), devices=self.options.devices):
            step = version.step.with_plan(dataclasses.replace(plan, annotations=_lasting(plan), remat={}))
            return plan_remat.fitted(step, version.args, self.options.limit)

    def planned_anew(self, plan: Plan, search: MeshSearch, version: Version) -> Plan:
        """The plan for its mesh where blocks keep more: with the annotations of a new search, or with its own."""
        completion, _ = version.completed(plan.axes, self.options.devices)
        search = dataclasses.replace(search, version=version, completion=completion)
        best = search.best(max(1.0, self.options.left / 2))
        of = best.annotation_search
        own = of.completed(of.places.without_kept(_lasting(plan)))
        result = min(own, best.annotated(), key=lambda one: rank(one.costs, self.options.fits))
        return best.plan(*best.polish().run(result), plan.candidates[1:])


def _lasting(plan: Plan) -> dict[str, P]:
    """The annotations of a plan but those of one of several values that a line recomputes, which are numbered
    otherwise where blocks keep more."""
    return {name: spec for name, spec in plan.annotations.items() if not (is_of_recomputed(name) and "#" in name)}
