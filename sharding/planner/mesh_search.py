"""The best plan for one mesh, and what it becomes with an annotation that the user asks about.

The program becomes a problem (`graph_problem.py`), which a solver decides; what it wants is costed as the completed
program is: by the ledger, the memory report and the estimate. If the peak exceeds the limit, the problem's own limit
falls in proportion.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
from jax.sharding import PartitionSpec as P

from ..completion import Completion
from ..cost import Topology
from ..display.units import bytes_text
from ..errors import ShardingError
from ..explain.memory_report import memory
from ..explain.program_costs import Costs, ProgramCosts
from ..graph import Annotation
from ..graph.garbage_collection import no_collection
from ..hardware import Devices, Platform
from ..propagation import Assignment
from ..propagation.added_annotation import named_annotations
from ..spec import Spec, sizes_text, to_partition_spec
from .algorithms import solve
from .graph_problem import MICRO, GraphProblem
from .parallel_plan import Candidate, NextBest, Plan
from .plan_annotations import Annotated, AnnotationSearch, is_close, rank
from .plan_polish import Polish
from .plan_version import Version
from .problem_builder import of_graph
from .solution import Solution

HIDDEN: Mapping[Platform, tuple[float, ...]] = {"cpu": (0.0,), "tpu": (0.0,), "gpu": (0.0, 0.75)}
"""Parts of the collectives of parameters, gradients and other arguments that are taken to be hidden behind computation,
each of which gives a problem: XLA:GPU starts them early, but how early depends on the plan."""
WIRE_SHARE = 0.2
"""Of the time of a plan, as the price of its bytes on the wire: for a second plan, which sends less."""
LITTLE = 0.02
"""Of a plan's cost that is not worth another limit for a second plan."""
MAX_LIMITS = 4
"""Limits of the problem that are tried until the completed program fits."""
LEAST_SECONDS = 2.0
"""That a solver gets, which it needs where it can't prove its choice."""
MARGIN = 0.97
"""What the limit falls by beyond the proportion."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What to search for, and how long."""

    devices: Devices
    algorithm: str
    limit: float
    """On peak memory, in bytes."""
    deadline: float
    """Of `time.monotonic`."""
    seed: int

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def fits(self, found: Costs | ProgramCosts) -> bool:
        """Whether a program is within the memory limit."""
        return found.peak_bytes <= self.limit


@dataclass(frozen=True, kw_only=True)
class MeshSearch:
    """The search for one mesh."""

    version: Version
    axes: Mapping[str, int]
    completion: Completion
    """The program without a plan."""
    on: Topology
    options: SearchOptions
    kept: Mapping[str, P] = field(default_factory=dict)
    """Annotations that the plan must have."""
    tried: list[MeshPlan] = field(default_factory=list, init=False)
    """All solutions so far."""

    def best(self, seconds: float) -> MeshPlan:
        """The best plan; what exceeds the limit least if nothing fits."""
        graph = self.completion.assignment.graph
        of = of_graph(graph, self.on, annotations={**graph.annotations, **self.pinned()})
        shares = HIDDEN[self.options.devices.chip.platform]
        found = [one for hidden in shares for one in self.weighed(of, hidden, seconds / len(shares))]
        return min(found, key=lambda one: rank(one.costs, self.options.fits))

    def weighed(self, of: GraphProblem, hidden: float, seconds: float) -> Iterator[MeshPlan]:
        """The fastest plan, and one that sends less, if it is another."""
        fastest = self.solved(of.weighed(hidden=hidden), seconds / 2)
        yield fastest
        if fastest.costs.wire_bytes:
            price = WIRE_SHARE * fastest.costs.seconds / fastest.costs.wire_bytes
            like = fastest if math.isinf(fastest.limit) else None
            other = self.solved(of.weighed(hidden=hidden, price=price), seconds / 2, like)
            if not np.array_equal(other.solution.choice, fastest.solution.choice):
                bound = fastest.solution.bound
                solution = dataclasses.replace(other.solution, problem=fastest.of.problem, bound=bound)
                yield dataclasses.replace(other, of=fastest.of, solution=solution)

    def pinned(self) -> dict[int, Annotation]:
        """The annotations that the plan must have, by value."""
        base = self.completion.assignment
        return named_annotations(base.graph, self.kept, base.sizes)

    def asked(self, changes: Mapping[str, P], seconds: float) -> MeshSearch:
        """The search for a plan that must have these annotations, too."""
        options = dataclasses.replace(self.options, deadline=time.monotonic() + seconds)
        rest = {name: spec for name, spec in self.kept.items() if name not in changes}
        return dataclasses.replace(self, options=options, kept=rest | dict(changes))

    def replanned(self, changes: Mapping[str, P], seconds: float) -> Plan:
        """A plan with annotations that it must have, see `Plan.what_if`."""
        found = self.asked(changes, seconds).best(seconds).that_fits(changes)
        return found.plan(found.annotated(), {}, ())

    def solved(self, of: GraphProblem, seconds: float, like: MeshPlan | None = None) -> MeshPlan:
        """The best solution of a problem.

        Args:
            of: the problem.
            seconds: for the solver.
            like: a solution of the same problem with other costs, which needs no limit.
        """
        best: MeshPlan | None = None
        limit = math.inf
        each = max(seconds / MAX_LIMITS, LEAST_SECONDS)
        for _ in range(MAX_LIMITS):
            try:
                solution = solve(of.problem, self.options.algorithm, limit, each, self.options.seed)
            except ShardingError:
                if best is None:
                    raise
                break
            now = self.costed(of, solution, limit)
            self.tried.append(now)
            best = now if best is None else min(best, now, key=lambda one: rank(one.costs, self.options.fits))
            if self.options.fits(now.costs) or limit <= of.problem.least_peak_bytes:
                break
            if like is not None and self.is_good_enough(like, of, solution.bound):
                return like
            limit = max(of.problem.least_peak_bytes, self.lower_limit(now, like))
        assert best is not None
        return best

    def is_good_enough(self, like: MeshPlan, of: GraphProblem, bound: float) -> bool:
        """Whether a plan that fits costs little more than the least that a solution does, whether that fits or not."""
        return self.options.fits(like.costs) and (1 - LITTLE) * of.problem.cost(like.solution.choice) <= bound

    def lower_limit(self, too_large: MeshPlan, like: MeshPlan | None) -> float:
        """The limit of a problem whose solution should fit: below that of one that doesn't.

        In proportion to the peaks of the program and the problem; if the peaks of another solution that fits are known,
        between the two.
        """
        own, most = too_large.peaks, self.options.limit
        if like is None or not self.options.fits(like.costs) or like.solution.peak_bytes >= own[0]:
            return MARGIN * own[0] * most / own[1]
        least = like.peaks
        return least[0] + MARGIN * (own[0] - least[0]) * (most - least[1]) / (own[1] - least[1])

    def costed(self, of: GraphProblem, solution: Solution, limit: float) -> MeshPlan:
        """A solution with the costs of the program that is sharded so."""
        assignment = self.completion.assignment
        wanted = tuple(of.sharding(v, solution.choice) for v in range(len(assignment.specs)))
        specs = tuple(spec or own for spec, own in zip(wanted, assignment.specs, strict=True))
        assignment = dataclasses.replace(assignment, specs=specs)
        return MeshPlan(
            search=self,
            of=of,
            solution=solution,
            limit=limit,
            wanted=wanted,
            assignment=assignment,
        )

    @property
    def costs(self) -> Callable[[Assignment], ProgramCosts]:
        """The costs of the program with other shardings."""
        platform = self.options.devices.chip.platform
        return partial(ProgramCosts, on=self.on, donated=self.completion.donated_leaves, platform=platform)


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """What a solver found for one mesh, before it is written as annotations."""

    search: MeshSearch
    of: GraphProblem
    solution: Solution
    limit: float
    """On the problem's memory; inf if the program fits without one."""
    wanted: tuple[Spec | None, ...]
    assignment: Assignment
    """The program sharded as it wants, or as annotations make it."""
    known_costs: ProgramCosts | None = None

    @cached_property
    def costs(self) -> ProgramCosts:
        """Of this program."""
        return self.search.costs(self.assignment) if self.known_costs is None else self.known_costs

    @property
    def peaks(self) -> tuple[float, float]:
        """Of the problem and of the program, in bytes."""
        return self.solution.peak_bytes, self.costs.peak_bytes

    @no_collection()
    def annotated(self, slack: float = 1.0) -> Annotated:
        """The program with the annotations that make it so.

        Args:
            slack: peak memory over the limit up to which annotations are chosen by time.
        """
        options = self.search.options
        fits = dataclasses.replace(options, limit=slack * options.limit).fits
        return self.annotation_search.run(self.costs.seconds, fits, options.deadline)

    @cached_property
    def annotation_search(self) -> AnnotationSearch:
        """The search for these annotations, which remembers what it looked up."""
        return AnnotationSearch(
            base=self.search.completion.assignment,
            wanted=self.wanted,
            alike=self.of.node_of_value,
            costed=self.search.costs,
            kept=self.search.kept,
        )

    def with_annotations(self, result: Annotated) -> MeshPlan:
        """The program as annotations make it, which may be otherwise than wanted."""
        return dataclasses.replace(self, assignment=result.assignment, known_costs=result.costs)

    def polish(self) -> Polish:
        """The last changes to these annotations."""
        options, choice = self.search.options, self.solution.choice
        search = self.annotation_search
        return Polish(of=self.of, choice=choice, search=search, fits=options.fits, deadline=options.deadline)

    def plan(self, result: Annotated, next_best: Mapping[str, NextBest], rest: Sequence[Candidate]) -> Plan:
        """The plan of some annotations.

        Args:
            result: the program with them.
            next_best: annotation -> what the next best spec would cost.
            rest: the plans for other meshes.
        """
        completion, axes, costs = self.search.completion, self.search.axes, result.all_costs()
        graph = completion.assignment.graph
        version = self.search.version
        first = Candidate(
            axes=tuple(axes.items()),
            stages=version.stages,
            costs=costs,
            num_annotations=len(result.annotations),
        )
        return Plan(
            name=completion.name,
            devices=str(self.search.options.devices),
            axes=axes,
            annotations=result.annotations,
            arguments=tuple(
                (graph.first_names.get(v, f"argument {k}"), to_partition_spec(result.assignment.boundary_spec(v)))
                for k, v in enumerate(graph.inputs)
            ),
            costs=costs,
            memory_bytes=self.search.options.limit,
            algorithm=self.solution.algorithm,
            bound_seconds=self.solution.bound / MICRO,
            planned_seconds=self.solution.cost / MICRO,
            stages=version.stages,
            remat=version.policies,
            next_best=next_best,
            candidates=(first, *rest),
            replan=partial(self.replanned, result),
        )

    def replanned(self, present: Annotated, changes: Mapping[str, P], seconds: float) -> Plan:
        """The plan with other annotations that it must have, see `Plan.what_if`.

        Args:
            present: the plan's annotations: those that the new plan wants, too, are where its own start. The new ones
                are good enough if they come as close to what a plan wants.
            changes: the annotations that it must have.
            seconds: for the solver; if the plan's annotations don't help, also for leaving out what saves nothing.
        """
        search = self.search.asked(changes, seconds)
        of, options = self.of.pinned(search.pinned()), search.options
        solution = solve(of.problem, options.algorithm, self.limit, options.left, options.seed)
        found = search.costed(of, solution, self.limit)
        result = self.with_present(found, present)
        if result is None:
            found = search.solved(of, seconds).that_fits(changes)
            result = found.annotated()
        return found.with_annotations(result).that_fits(changes).plan(result, {}, ())

    def with_present(self, other: MeshPlan, present: Annotated) -> Annotated | None:
        """Another plan for this program with this plan's annotations as far as they suit it; None if it is not good.

        It is if it takes as much longer than the present one as the problem says, and fits.
        """
        fits = other.search.options.fits
        annotations = dataclasses.replace(self.annotation_search, wanted=other.wanted, kept=other.search.kept)
        goal = present.costs.seconds * max(1.0, other.solution.cost / (self.solution.cost or 1.0))

        def is_good(one: Annotated) -> bool:
            return fits(one.costs) and is_close(one.costs, goal)

        result = annotations.completed(present.annotations)
        if not is_good(result):
            same = {
                name: spec
                for name, spec in present.annotations.items()
                if self.decides_alike(other, annotations.values(name))
            }
            result = annotations.extended(same, goal, fits)
        if not is_good(result):
            return None
        more = [name for name in annotations.free(result) if name not in present.annotations]
        return annotations.without_idle(result, more) if more else result

    def decides_alike(self, other: MeshPlan, values: Mapping[str, int]) -> bool:
        """Whether another plan wants the same of some values."""
        return all(self.wanted[v] == other.wanted[v] for v in values.values())

    def that_fits(self, changes: Mapping[str, P]) -> MeshPlan:
        """The plan itself. Raises `too_large` if these annotations of `Plan.what_if` leave none that fits."""
        if not self.search.options.fits(self.costs):
            raise self.too_large(f"plan.what_if({', '.join(changes)})")
        return self

    def too_large(self, asked: str) -> ShardingError:
        """What is missing for it to fit: its peak, what fills it, and what would lower it."""
        search = self.search
        platform, limit = search.options.devices.chip.platform, search.options.limit
        report = memory(self.assignment, donated=search.completion.donated_leaves, platform=platform)
        classes = {category: size for category, size in report.by_class.items() if size}
        activations = sum(size for category, size in classes.items() if "activations" in category)
        filled = ", ".join(f"{category} {bytes_text(size)}" for category, size in classes.items())
        return ShardingError(
            asked,
            found=[
                f"{bytes_text(self.costs.peak_bytes)} at the least, on mesh {sizes_text(search.axes)}",
                f"at its peak: {filled}",
            ],
            required=f"a plan within {bytes_text(int(limit))} per device",
            fix=[
                f"memory_bytes={self.costs.peak_bytes}",
                *(["jax.checkpoint(layer, policy=remat.auto) around each layer"] if activations > limit / 4 else []),
                "more devices",
                "a smaller batch",
            ],
        )
