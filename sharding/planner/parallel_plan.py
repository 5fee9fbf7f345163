"""`Plan`: a mesh, the few annotations and the recomputation that make a program run as planned."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from ..display import Column, Table, Tabular
from ..display.units import bytes_text, seconds_text
from ..errors import ShardingError
from ..explain.program_costs import Costs
from ..mesh import MeshContext, mesh
from ..paths.lookup import find
from ..spec import sizes_text
from . import plan_remat
from .plan_stages import Stages

VERSION = 2
"""Of the file format."""
COLUMNS = (
    Column("annotate", "code"),
    Column("as", "code"),
    Column("next best", "code"),
    Column("step then", "seconds"),
    Column("sends then", "bytes"),
    Column("peak then", "bytes"),
)
CANDIDATE_COLUMNS = (
    Column("mesh", "code"),
    Column("schedule, microbatches"),
    Column("step", "seconds"),
    Column("sends", "bytes"),
    Column("peak memory", "bytes"),
    Column("arguments", "bytes"),
    Column("annotations", "number"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NextBest:
    """The next best spec of one annotation, and what a step with it costs."""

    spec: P
    costs: Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The best plan found for one mesh."""

    axes: tuple[tuple[str, int], ...]
    costs: Costs
    num_annotations: int
    stages: Stages | None = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Plan(Tabular):
    """A mesh, the annotations that propagation does not infer by itself, what blocks keep, and what a step then costs.

    `sharding.jit(step, plan=plan)` under `plan.mesh()` runs it.

    Example:
        >>> import jax, sharding
        >>> x = jax.ShapeDtypeStruct((4096, 4096), "float32")
        >>> plan = sharding.plan(lambda x: (x * 2).sum(), x, devices="h100:1x8", mesh={"x": 8})
        >>> plan.in_shardings(x), plan.costs.sent_bytes, plan.diff(plan)
        ((P('x',),), 4, ())
    """

    name: str
    """Of the planned function."""
    devices: str
    """The devices that it is planned for, such as `v5p:4x8x8`."""
    axes: Mapping[str, int]
    """The mesh: axis -> size, major axis first."""
    annotations: Mapping[str, P]
    """Name, as `Completion.annotate` takes it -> spec."""
    arguments: tuple[tuple[str, P], ...]
    """The name and spec of each array in the arguments, in their order."""
    costs: Costs
    """Of a step, as the completed program has them."""
    memory_bytes: float
    """The limit that it was planned for; inf without one."""
    algorithm: str
    bound_seconds: float
    """No plan for this mesh has a lower cost in the model that was searched, of seconds without overlap."""
    planned_seconds: float
    """The plan's cost in that model."""
    stages: Stages | None = None
    """Of the pipeline, if the plan is of a version of the step in stages."""
    remat: plan_remat.Policies = field(default_factory=dict)
    """Group of blocks under `remat.auto[group]` -> what they keep for their backward; empty if there are none."""
    next_best: Mapping[str, NextBest] = field(default_factory=dict)
    """Annotation -> what the next best spec would cost."""
    candidates: tuple[Candidate, ...] = ()
    """The best plans for all meshes tried, the chosen one first."""
    replan: Callable[[Mapping[str, P], float], Plan] | None = None
    """Plans again with annotations and seconds, by the problem that is there; None if the plan was read from a file."""

    def mesh(self, devices: Any = None) -> MeshContext:
        """The mesh of the plan, to enter.

        Args:
            devices: as for `sharding.mesh`. Default: the devices that JAX lists. `plan.devices` describes those that
                it was planned for.
        """
        return mesh(dict(self.axes), devices=devices)

    @property
    def keeps_everything(self) -> bool:
        """Whether blocks under `remat.auto` keep everything, as without `jax.checkpoint`."""
        return all(policy == plan_remat.EVERYTHING_KEPT for policy in self.remat.values())

    def tracing(self) -> AbstractContextManager[None]:
        """The context in which a step is traced, so that blocks under `remat.auto` keep what the plan says."""
        return plan_remat.tracing(self.remat)

    def in_shardings(self, *args: Any) -> tuple[Any, ...]:
        """The plan's spec of each array in the arguments, for `jax.jit` or to place them.

        Args:
            *args: the arguments that it was planned for, or ShapeDtypeStructs.

        Raises:
            ShardingError: another number of arrays.
        """
        leaves, tree = jax.tree.flatten(args)
        if len(leaves) != len(self.arguments):
            raise ShardingError(
                f"{self.name}: plan.in_shardings(...)",
                found=f"{len(leaves)} arrays in the arguments",
                required=f"the {len(self.arguments)} arrays that it was planned for",
            )
        return jax.tree.unflatten(tree, [spec for _, spec in self.arguments])

    def why(self, name: str) -> str:
        """What the next best spec of an annotation would have cost.

        Args:
            name: of an annotation, or the end of one.

        Raises:
            ShardingError: the plan has no such annotation.
        """
        numbers = {known: k for k, known in enumerate(self.annotations)}
        known = list(self.annotations)[find(numbers, name, lambda k: list(self.annotations.values())[k])]
        text = f"{known}: {self.annotations[known]}, {self.costs}"
        other = self.next_best.get(known)
        return text if other is None else f"{text}; next best {other.spec}, {other.costs}"

    def what_if(self, annotations: Mapping[str, P], *, seconds: float = 60) -> Plan:
        """The plan for the same mesh and limit if some arrays had to be sharded in a given way.

        The problem of the program is solved again with these decisions made, which takes a small part of the time of
        `sharding.plan`. Next best specs are not searched.

        Args:
            annotations: name, as `Completion.annotate` takes it -> spec. They stay in plans that this one is asked for.
            seconds: for the solver, as for `sharding.plan`.

        Raises:
            ShardingError: no such array, a spec that does not fit it, nothing fits in memory, or the plan was read from
                a file, which has no program.

        Example:
            >>> import jax, sharding
            >>> from sharding import P
            >>> x = jax.ShapeDtypeStruct((4096, 4096), "float32")
            >>> plan = sharding.plan(lambda x: x * x.mean(1, keepdims=True), x, devices="h100:1x8", mesh={"x": 8})
            >>> other = plan.what_if({"x": P(None, "x")})
            >>> plan.costs.sent_bytes, other.costs.sent_bytes, plan.diff(other)[0]
            (0, 16384, "x: P('x',) -> P(None, 'x')")
        """
        if self.replan is None:
            raise ShardingError(
                f"{self.name}: plan.what_if({', '.join(annotations)})",
                found="a plan that was read from a file, without the program",
                required="a plan from sharding.plan",
            )
        return self.replan(annotations, seconds)

    def diff(self, other: Plan) -> tuple[str, ...]:
        """The differences to another plan, line by line."""
        lines = []
        if dict(self.axes) != dict(other.axes):
            lines.append(f"mesh: {sizes_text(self.axes)} -> {sizes_text(other.axes)}")
        if self.stages != other.stages:
            lines.append(f"stages: {self.stages} -> {other.stages}")
        for name in dict.fromkeys((*self.annotations, *other.annotations)):
            a, b = self.annotations.get(name, "inferred"), other.annotations.get(name, "inferred")
            if a != b:
                lines.append(f"{name}: {a} -> {b}")
        for group in dict.fromkeys((*self.remat, *other.remat)):
            a, b = self.remat.get(group), other.remat.get(group)
            if a != b:
                lines.append(f"remat.auto[{group!r}]: {a} -> {b}")
        mine, theirs = self.costs, other.costs
        for what, text in (("seconds", seconds_text), ("sent_bytes", bytes_text), ("peak_bytes", bytes_text)):
            a, b = getattr(mine, what), getattr(theirs, what)
            if a != b:
                lines.append(f"{what}: {text(a)} -> {text(b)}")
        return tuple(lines)

    def code(self) -> str:
        """The plan as plain JAX: the mesh, the specs of the arguments, and what to constrain where."""
        sizes = ", ".join(map(str, self.axes.values()))
        inside = {name: spec for name, spec in self.annotations.items() if ":" in name}
        lines = [
            "import jax",
            "from jax.sharding import PartitionSpec as P",
            "",
            f"axis_types = (jax.sharding.AxisType.Auto,) * {len(self.axes)}",
            f"mesh = jax.make_mesh(({sizes},), {tuple(self.axes)!r}, axis_types=axis_types)",
            "in_shardings = {",
            *(f"    {name!r}: {spec!r}," for name, spec in self.arguments),
            "}",
        ]
        places = [
            f"# the result of {name}: jax.lax.with_sharding_constraint(..., {spec!r})" for name, spec in inside.items()
        ]
        kept = [f"# blocks of remat.auto[{group!r}]: {plan_remat.code(policy)}" for group, policy in self.remat.items()]
        return "\n".join([*lines, *places, *kept])

    def save(self, path: str | Path) -> Path:
        """Writes the plan as JSON, which `Plan.load` reads.

        Returns:
            The path of the file.
        """
        content = {
            "version": VERSION,
            "name": self.name,
            "devices": self.devices,
            "axes": dict(self.axes),
            "annotations": {name: _entries(spec) for name, spec in self.annotations.items()},
            "arguments": [[name, _entries(spec)] for name, spec in self.arguments],
            "costs": asdict(self.costs),
            "memory_bytes": self.memory_bytes if self.memory_bytes < float("inf") else None,
            "algorithm": self.algorithm,
            "bound_seconds": self.bound_seconds,
            "planned_seconds": self.planned_seconds,
            "stages": None if self.stages is None else asdict(self.stages),
            "remat": plan_remat.to_json(self.remat),
            "next_best": {
                name: {"spec": _entries(n.spec), "costs": asdict(n.costs)} for name, n in self.next_best.items()
            },
            "candidates": [
                {
                    "axes": dict(c.axes),
                    "costs": asdict(c.costs),
                    "num_annotations": c.num_annotations,
                    "stages": None if c.stages is None else asdict(c.stages),
                }
                for c in self.candidates
            ],
        }
        found = Path(path)
        found.write_text(json.dumps(content, indent=1) + "\n")
        return found

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan from a file.

        Raises:
            ShardingError: the file is missing, or is not a plan of this format.
        """
        try:
            content = json.loads(Path(path).read_text())
            if content["version"] != VERSION:
                raise ValueError(f"version {content['version']}")
            return cls(
                name=content["name"],
                devices=content["devices"],
                axes={axis: int(size) for axis, size in content["axes"].items()},
                annotations={name: _spec(entries) for name, entries in content["annotations"].items()},
                arguments=tuple((name, _spec(entries)) for name, entries in content["arguments"]),
                costs=Costs(**content["costs"]),
                memory_bytes=float("inf") if content["memory_bytes"] is None else content["memory_bytes"],
                algorithm=content["algorithm"],
                bound_seconds=content["bound_seconds"],
                planned_seconds=content["planned_seconds"],
                stages=_stages(content["stages"]),
                remat=plan_remat.from_json(content["remat"]),
                next_best={
                    name: NextBest(spec=_spec(n["spec"]), costs=Costs(**n["costs"]))
                    for name, n in content["next_best"].items()
                },
                candidates=tuple(
                    Candidate(
                        axes=tuple(c["axes"].items()),
                        costs=Costs(**c["costs"]),
                        num_annotations=c["num_annotations"],
                        stages=_stages(c["stages"]),
                    )
                    for c in content["candidates"]
                ),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ShardingError(
                f"planner.Plan.load({str(path)!r})",
                found=f"{type(error).__name__}: {error}",
                required=f"a plan of version {VERSION}, written by Plan.save",
            ) from error

    def tables(self) -> list[Table]:
        """The annotations with their next best specs, and the best plan of each mesh."""
        rows = []
        for name, spec in self.annotations.items():
            other = self.next_best.get(name)
            rest = ("", None, None, None)
            if other is not None:
                rest = (str(other.spec), other.costs.seconds, other.costs.sent_bytes, other.costs.peak_bytes)
            rows.append((name, str(spec), *rest))
        meshes = [
            (sizes_text(dict(c.axes)), "" if c.stages is None else f"{c.stages.schedule}, {c.stages.microbatches}")
            + (c.costs.seconds, c.costs.sent_bytes, c.costs.peak_bytes, c.costs.argument_bytes, c.num_annotations)
            for c in self.candidates
        ]
        found = [Table(self._title(), COLUMNS, rows)]
        if self.remat:
            found.append(plan_remat.table(self.remat))
        return [*found, Table("the best plan for each mesh tried", CANDIDATE_COLUMNS, meshes)] if meshes else found

    def _title(self) -> str:
        stages = "" if self.stages is None else f", {self.stages}"
        return f"plan of {self.name} on {self.devices}, mesh {sizes_text(self.axes)}{stages}: {self.costs}"

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables()))

    __repr__ = __str__


def _stages(found: Mapping[str, Any] | None) -> Stages | None:
    return None if found is None else Stages(**found)


def _entries(spec: P) -> list[Any]:
    return [list(entry) if isinstance(entry, tuple) else entry for entry in spec]


def _spec(entries: Sequence[Any]) -> P:
    return P(*(tuple(entry) if isinstance(entry, list) else entry for entry in entries))
