"""Comparison of our propagation with Shardy, value by value on the same program."""

from dataclasses import dataclass

from jax.sharding import AbstractMesh

import sharding
from sharding import compat, graph
from sharding.graph import Graph
from sharding.propagation import Assignment, complete, shardy


@dataclass(frozen=True)
class Agreement:
    """Agreement of our propagation with Shardy on one program."""

    num_sharded: int
    """Number of values that either side shards."""
    differences: tuple[str, ...]
    """One line per value on which they differ."""

    @property
    def share(self) -> float:
        return 1 - len(self.differences) / max(1, self.num_sharded)


def compare(program, in_annotations, mesh: AbstractMesh) -> Agreement:
    """Our completion of `program` (a closed jaxpr with annotations on its arguments) against Shardy's."""
    ours = complete_jaxpr(program, dict(mesh.shape), in_annotations)
    return _agreement(ours, shardy.shardings(ours.graph, program, mesh))


def _agreement(ours: Assignment, theirs: dict[int, shardy.Axes]) -> Agreement:
    num_sharded, differences = 0, []
    for v, dims in theirs.items():
        mine = ours.specs[v].axes
        if any(mine) or any(dims):
            num_sharded += 1
            if mine != dims:
                differences.append(f"{_name(ours.graph, v)}: ours {ours.specs[v]}, Shardy {_text(dims)}")
    return Agreement(num_sharded, tuple(differences))


def compare_step(step, sizes) -> Agreement:
    """Both passes on a train step (`train_steps.step.Step`) over described devices, with its state donated."""
    with sharding.mesh(sizes, devices=8):
        jitted = sharding.jit(step.run, in_shardings=step.specs, donate_argnums=0, engine="shardy")
        theirs = jitted.complete(*step.args).assignment
        ours = complete(theirs.graph, sizes)
    return _agreement(ours, {v: theirs.specs[v].axes for v in program_values(ours.graph)})


def complete_jaxpr(program, sizes, in_annotations) -> Assignment:
    """Our propagation on a closed jaxpr with the given argument annotations and no sharding groups."""
    jaxpr = compat.open_jaxpr(program)
    n_in, n_out = len(jaxpr.invars), len(jaxpr.outvars)
    built = graph.build(
        program,
        sizes=sizes,
        in_names=[f"in/{i}" for i in range(n_in)],
        out_names=[f"out/{i}" for i in range(n_out)],
        in_annotations=in_annotations,
        out_annotations=[None] * n_out,
    )
    return complete(built, sizes)


def _name(g: Graph, v: int) -> str:
    maker = next((op.name for op in g.ops if v in op.results), "argument")
    return f"{v} {maker} {list(g.shapes[v])} at {g.source(v)}"


def _text(dims: shardy.Axes) -> str:
    return "[" + ", ".join(",".join(map(str, d)) or "-" for d in dims) + "]"


def program_values(g: Graph) -> list[int]:
    """All variables and results of the program, without the internal values that our graph adds to loops."""

    def of(scope):
        return [v for v in scope.env.values() if v is not None] + [v for c in scope.children.values() for v in of(c)]

    return sorted({*of(g.scope), *g.outputs})
