"""The best plan for each of some meshes, and the annotations of the best ones."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..completion import Completion
from ..cost import Topology
from ..cost.topology import topology_of_sizes
from ..errors import ShardingError
from ..explain.program_costs import Costs, costs
from ..hardware import Devices, Platform
from ..mesh import mesh as mesh_of
from ..propagation import Assignment
from ..spec import Spec, sizes_text, to_partition_spec
from . import plan_remat
from .algorithms import solve
from .graph_problem import MICRO, GraphProblem, of_graph
from .parallel_plan import Candidate, Plan
from .plan_annotations import Annotated, AnnotationSearch, rank
from .plan_polish import Polish
from .plan_stages import Stages
from .solution import Solution

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


@dataclass(frozen=True, kw_only=True)
class Version:
    """A step to plan: whole or in stages, with a choice of what its blocks keep."""

    step: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    stages: Stages | None = None
    policies: plan_remat.Policies = field(default_factory=dict)
    """What blocks under `remat.auto` keep."""

    def completed(self, axes: Mapping[str, int], devices: Devices) -> tuple[Completion, Topology]:
        """The program over a mesh without a plan, and the mesh with its links."""
        with mesh_of(dict(axes), devices=devices), plan_remat.tracing(self.policies):
            return self.step.complete(*self.args, **self.kwargs), topology_of_sizes(axes, devices, None)

    def ends(self, axes: Mapping[str, int], devices: Devices) -> list[Version]:
        """The versions that keep most and least for their backward; one if nothing chooses."""
        with mesh_of(dict(axes), devices=devices):
            choices = plan_remat.ends(self.step, self.args, self.kwargs)
        return [dataclasses.replace(self, policies=policies) for policies in choices]

    def name(self, axes: Mapping[str, int]) -> str:
        """The version on a mesh."""
        return sizes_text(axes) + (f", {self.stages}" if self.stages else "")


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best that a solver found for one mesh."""

    version: Version
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
class MeshSearch:
    """The search over meshes and versions of a step, within a time."""

    devices: Devices
    algorithm: str
    limit: float
    deadline: float
    seed: int
    on_progress: Callable[[str], None]
    is_interrupted: bool = False
    """By Ctrl-C."""
    smallest: Found | None = None
    """The one with the smallest peak, if none fits."""

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def fits(self, found: Costs) -> bool:
        return found.peak_bytes <= self.limit

    def run(self, items: Sequence[tuple[Version, dict[str, int]]], seconds: float) -> list[Found]:
        """The best for each version on a mesh that fits."""
        found: list[Found] = []
        until = time.monotonic() + seconds
        try:
            for k, (version, axes) in enumerate(items):
                left = until - time.monotonic()
                if k and left <= 0:
                    break
                one = self.best(version, axes, max(1.0, left / (len(items) - k)))
                self.on_progress(f"{k + 1}/{len(items)} {version.name(axes)}: {one.costs}")
                if self.fits(one.costs):
                    found.append(one)
                elif self.smallest is None or one.costs.peak_bytes < self.smallest.costs.peak_bytes:
                    self.smallest = one
        except KeyboardInterrupt:
            self.is_interrupted = True
            if not found:
                raise
        return found

    def best(self, version: Version, axes: dict[str, int], seconds: float) -> Found:
        """The best for one mesh; what exceeds the limit least if nothing fits."""
        completion, on = version.completed(axes, self.devices)
        bare = partial(Found, version=version, axes=axes, completion=completion, on=on)
        shares = HIDDEN[self.devices.chip.platform]
        found = [self.solved(bare, completion, on, hidden, seconds / len(shares)) for hidden in shares]
        return min(found, key=lambda one: rank(one.costs, self.fits))

    def solved(
        self, bare: Callable[..., Found], completion: Completion, on: Topology, hidden: float, seconds: float
    ) -> Found:
        """The best where a part of the collectives of arguments is hidden behind computation."""
        graph = completion.assignment.graph
        of = of_graph(graph, on, annotations=graph.annotations, hidden=hidden)
        best: Found | None = None
        limit = math.inf
        for _ in range(MAX_LIMITS):
            try:
                solution = solve(of.problem, self.algorithm, limit, max(seconds / MAX_LIMITS, LEAST_SECONDS), self.seed)
            except ShardingError:
                if best is None:
                    raise
                break
            assignment, wanted = _as_wanted(completion.assignment, of, solution)
            now = bare(
                of=of,
                solution=solution,
                limit=limit,
                wanted=wanted,
                assignment=assignment,
                costs=self.costs(completion, on)(assignment),
            )
            best = now if best is None else min(best, now, key=lambda one: rank(one.costs, self.fits))
            if self.fits(now.costs) or limit <= of.problem.least_peak_bytes:
                break
            limit = max(of.problem.least_peak_bytes, MARGIN * solution.peak_bytes * self.limit / now.costs.peak_bytes)
        assert best is not None
        return best

    def costs(self, completion: Completion, on: Topology) -> Callable[[Assignment], Costs]:
        return partial(costs, on=on, donated=completion.donated_leaves, platform=self.devices.chip.platform)

    def plan(self, found: Sequence[Found]) -> Plan:
        """The cheapest plan of the best meshes."""
        annotated: list[tuple[Found, Annotated]] = []
        try:
            for one in found[:ANNOTATED]:
                annotated.append((one, self.annotated(one)))
                self.on_progress(f"{one.version.name(one.axes)} with annotations: {annotated[-1][1].costs}")
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
            Candidate(axes=tuple(one.axes.items()), stages=one.version.stages, costs=one.costs, num_annotations=0)
            for one in found
            if one is not best
        ]
        first = Candidate(
            axes=tuple(best.axes.items()),
            stages=best.version.stages,
            costs=result.costs,
            num_annotations=len(result.annotations),
        )
        plan = Plan(
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
            stages=best.version.stages,
            remat=best.version.policies,
            next_best=next_best,
            candidates=(first, *rest),
        )
        return self.fitted(plan, best.version)

    def fitted(self, plan: Plan, version: Version) -> Plan:
        """The plan with what its blocks can keep within the limit, if that is better."""
        if not plan.remat or plan.keeps_everything or version.kwargs or self.is_interrupted or self.left <= 0:
            return plan
        with mesh_of(dict(plan.axes), devices=self.devices):
            step = version.step.with_plan(dataclasses.replace(plan, remat={}))
            policies = plan_remat.fitted(step, version.args, self.limit)
        if policies is None:
            return plan
        planned = dataclasses.replace(version, step=step, policies=policies)
        completion, on = planned.completed(plan.axes, self.devices)
        now = self.costs(completion, on)(completion.assignment)
        self.on_progress(f"{version.name(plan.axes)} with recomputation that fits: {now}")
        if rank(now, self.fits) >= rank(plan.costs, self.fits):
            return plan
        return dataclasses.replace(plan, remat=policies, costs=now)

    def annotated(self, one: Found) -> Annotated:
        return self.search_of(one).run(one.costs.seconds, self.fits, self.deadline)

    def search_of(self, one: Found) -> AnnotationSearch:
        return AnnotationSearch(
            base=one.completion.assignment,
            wanted=one.wanted,
            alike=one.of.node_of_value,
            costed=self.costs(one.completion, one.on),
        )


def _as_wanted(
    completed: Assignment, of: GraphProblem, solution: Solution
) -> tuple[Assignment, tuple[Spec | None, ...]]:
    """The program sharded as a solution wants, and what it wants of each value; None where it wants nothing."""
    wanted = tuple(of.sharding(v, solution.choice) for v in range(len(completed.specs)))
    specs = tuple(spec or own for spec, own in zip(wanted, completed.specs, strict=True))
    return dataclasses.replace(completed, specs=specs), wanted
