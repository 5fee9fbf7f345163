"""Second opinion on the pass: XLA's own, Shardy, value by value on the same program."""

from dataclasses import dataclass

from jax.sharding import AbstractMesh

import sharding
from sharding import compat, graph
from sharding.graph import Graph
from sharding.propagation import Assignment, complete, shardy


@dataclass(frozen=True)
class Agreement:
    """How far our pass and Shardy agree on one program."""

    counted: int
    """Values of one dim or more that either side splits."""
    differences: tuple[str, ...]
    """One line per value on which they differ, with our reason."""

    @property
    def share(self) -> float:
        return 1 - len(self.differences) / max(1, self.counted)


def compare(program, in_pins, mesh: AbstractMesh) -> Agreement:
    """Our completion of `program` (a closed jaxpr with pins on its arguments) against Shardy's."""
    ours = pass_on(program, dict(mesh.shape), in_pins)
    return _agreement(ours, shardy.splits(ours.graph, program, mesh))


def _agreement(ours: Assignment, theirs: dict[int, shardy.Axes]) -> Agreement:
    counted, differences = 0, []
    for v, dims in theirs.items():
        mine = ours.specs[v].axes
        if any(mine) or any(dims):
            counted += 1
            if mine != dims:
                differences.append(f"{_name(ours.graph, v)}: ours {ours.specs[v]}, Shardy {_text(dims)}")
    return Agreement(counted, tuple(differences))


def of_step(step, sizes) -> Agreement:
    """Both completions of a train step (`steps.step.Step`) on a described mesh, its state donated."""
    with sharding.mesh(sizes, devices=8):
        ours, theirs = (
            sharding.jit(step.run, in_shardings=step.specs, donate_argnums=0, engine=engine)
            .complete(*step.args)
            .assignment
            for engine in ("sharding", "shardy")
        )
    return _agreement(ours, {v: theirs.specs[v].axes for v in values(ours.graph)})


def pass_on(program, sizes, in_pins) -> Assignment:
    """Our pass on a closed jaxpr with the given pins on its arguments and no ties."""
    jaxpr = compat.open_jaxpr(program)
    n_in, n_out = len(jaxpr.invars), len(jaxpr.outvars)
    built = graph.build(
        program,
        sizes=sizes,
        in_names=[f"in/{i}" for i in range(n_in)],
        out_names=[f"out/{i}" for i in range(n_out)],
        in_pins=in_pins,
        out_pins=[None] * n_out,
    )
    return complete(built, sizes)


def _name(g: Graph, v: int) -> str:
    maker = next((op.name for op in g.ops if v in op.results), "argument")
    return f"{v} {maker} {list(g.shapes[v])} at {g.source(v)}"


def _text(dims: shardy.Axes) -> str:
    return "[" + ", ".join(",".join(map(str, d)) or "-" for d in dims) + "]"


def values(g: Graph) -> list[int]:
    """Every value that is a variable or a result of the program; what else a loop has is ours alone."""

    def of(scope):
        return [v for v in scope.env.values() if v is not None] + [v for c in scope.children.values() for v in of(c)]

    return sorted({*of(g.scope), *g.outputs})
