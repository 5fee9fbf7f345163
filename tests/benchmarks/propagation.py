"""Our completion pass compared with Shardy's propagation on the same GPT train steps, in alternating runs.

    python -m tests.benchmarks.propagation                    # GPT-3's size on 64 x 8 described devices, some minutes
    python -m tests.benchmarks.propagation --layers 6 12 --rounds 3 --json propagation.json

Programs are traced abstractly, so one CPU suffices for a model of 175 billion parameters. Timed are
  - ours: from the traced program to a spec for every value, including the graph;
  - Shardy's: `sdy-propagation-pipeline`, XLA's propagation passes, on the module that JAX lowers from the same step
    with the same annotations. Tracing, lowering and parsing the module are excluded on both sides;
  - a change: one more annotation on a completed program, on several arrays of the state in turn;
  - compiling a small step with all inferred constraints, relative to leaving them out for XLA to infer.

Each ratio is the median over pairs of consecutive runs, which a busy machine slows down equally, with the quartiles of
the pairs. The passes run on one core and are timed in CPU seconds, compilation in wall-clock seconds. Times depend on
the named machine; across machines compare only ratios. `peak_mb` is the peak memory of a fresh process that traces and
completes once, including Python and JAX.
"""

import gc
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx
from jaxlib.mlir import ir, passmanager

import sharding
from sharding import compat, graph, propagation
from sharding.jit import argument_shardings, tracing
from sharding.jit.arguments import Arguments
from sharding.jit.donation import outputs_reusing_donated
from sharding.jit.signature import Signature
from sharding.models import gpt, layouts
from sharding.rewrite.reshard_placement import placed
from sharding.spec import Dim, Spec, open_spec

from . import command_line
from .ratios import Ratio, rounded, unknown
from .result_file import Result, Row, measured
from .step import alternate, facts_of

BATCH = 1536


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model, the mesh and the number of runs."""

    mesh: str = "data=64,tensor=8"
    """Axis sizes; the axes are named data, fsdp and tensor."""
    layers: tuple[int, ...] = (6, 12, 24, 48, 96)
    """Depths of the unrolled model; the scanned model has the largest."""
    features: int = 12_288
    heads: int = 96
    vocab: int = 50_304
    context: int = 2048
    rounds: int = 7
    """Timed runs of each."""
    json: Path | None = None
    """Output file of the figures."""

    @property
    def axes(self) -> dict[str, int]:
        return {name: int(size) for name, _, size in (part.partition("=") for part in self.mesh.split(","))}

    def model(self, layers: int, *, scan: bool) -> gpt.Config:
        return gpt.Config(
            vocab=self.vocab, context=self.context, layers=layers, features=self.features, heads=self.heads,
            kv_heads=self.heads, mlp_features=4 * self.features, scan=scan,
        )  # fmt: skip


# The program.


@dataclass(frozen=True, kw_only=True)
class Step:
    """A train step with Adam, its abstract arguments and the annotations of the layout."""

    config: gpt.Config
    axes: dict[str, int]
    batch: int = BATCH

    def __call__(self, state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        nats, gradients = jax.value_and_grad(self._loss)(params, tokens)
        updates, opt_state = _optimizer().update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), nats

    def _loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.eval_shape(lambda: gpt.GPT(self.config, rngs=nnx.Rngs(0)))
        annotated = layouts.gpt(self.axes).annotate(params)
        return gpt.next_token_loss(nnx.merge(nnx.split(model, nnx.Param)[0], annotated), tokens)

    def arguments(self) -> tuple[Any, jax.ShapeDtypeStruct]:
        tokens = jax.ShapeDtypeStruct((self.batch, self.config.context + 1), "int32")
        return jax.eval_shape(partial(_initial, self.config), jax.random.key(0)), tokens

    def jitted(self, engine: str) -> Any:
        specs = (None, layouts.batch(self.axes))
        return sharding.jit(partial(self), in_shardings=specs, donate_argnums=(0,), engine=engine)


def _optimizer() -> optax.GradientTransformation:
    return optax.adamw(1e-3)


def _initial(config: gpt.Config, key: jax.Array) -> Any:
    params = nnx.state(gpt.GPT(config, rngs=nnx.Rngs(params=key)), nnx.Param)
    return params, _optimizer().init(params)


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A traced step with the arguments of `graph.build`."""

    jaxpr: Any
    build_arguments: dict[str, Any]

    @staticmethod
    def of(step: Step, mesh: Any) -> "Traced":
        args = step.arguments()
        call = Arguments.of(Signature.of(step), args, {})
        leaves, tree, names = call.leaves, call.tree, call.leaf_names
        traced = tracing.trace(step, call, leaves)
        specs = argument_shardings.broadcast_specs((None, layouts.batch(step.axes)), args, "in_shardings", "step")
        in_annotations = argument_shardings.leaf_annotations(
            specs, leaves, names, mesh, what="in_shardings", function="step"
        )
        num_out = len(traced.out_avals)
        return Traced(
            jaxpr=traced.jaxpr,
            build_arguments={
                "sizes": step.axes,
                "in_names": names,
                "out_names": [f"out/{i}" for i in range(num_out)],
                "in_annotations": in_annotations,
                "out_annotations": [None] * num_out,
                "ties": outputs_reusing_donated(traced, leaves, tree, (0,), [False] * num_out),
            },
        )

    @property
    def num_equations(self) -> int:
        return _num_equations(compat.open_jaxpr(self.jaxpr))

    def complete(self) -> propagation.Assignment:
        """The pass that is timed as ours."""
        built = graph.build(self.jaxpr, **self.build_arguments)
        return placed(propagation.complete(built, self.build_arguments["sizes"]))


def _num_equations(jaxpr: Any) -> int:
    """Number of equations; nested jaxprs count at each call, the calls do not."""
    inner = [[compat.open_jaxpr(sub) for _, _, sub in compat.sub_jaxprs(eqn.params)] for eqn in jaxpr.eqns]
    return sum(sum(map(_num_equations, subs)) if subs else 1 for subs in inner)


# How they are measured.


def seconds(f: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> float:
    """The time of a call, with garbage collection disabled, as in `sharding.jit`."""
    gc.collect()
    gc.disable()
    begun = clock()
    f()
    took = clock() - begun
    gc.enable()
    return took


class Shardy:
    """Shardy's propagation of a lowered step."""

    def __init__(self, step: Step):
        self.module = step.jitted("xla").lower(*step.arguments()).compiler_ir()
        with self.module.context:
            self.text = self.module.operation.get_asm(enable_debug_info=True)

    def seconds(self) -> float:
        """The time of one run, on a copy, as JAX caches the original."""
        with self.module.context:
            copy = ir.Module.parse(self.text)
            passes = passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)")
            return seconds(lambda: passes.run(copy.operation))


def change_seconds(assignment: propagation.Assignment, axis: str, times: int) -> float:
    """The median time of one more annotation, each on another argument: its last dim sharded over `axis`, open."""
    g = assignment.graph
    free = [v for v in g.inputs if g.shapes[v] and v not in g.annotations]
    took = []
    for v in free[:: max(1, len(free) // times)][:times]:
        spec = Spec(dims=(*open_spec(len(g.shapes[v]) - 1).dims, Dim(axes=(axis,), open=True)))
        took.append(seconds(partial(assignment.with_annotations, {v: graph.Annotation(spec=spec, origin="change")})))
    return statistics.median(took)


def peak_mb(step: Step) -> int:
    """The peak memory of a fresh process that traces and completes a step, in MB."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak_mb, step).result()


def _peak_mb(step: Step) -> int:
    jax.config.update("jax_platforms", "cpu")
    with sharding.mesh(step.axes, devices=_num_devices(step.axes)) as mesh:
        assignment = Traced.of(step, mesh).complete()
    found = _high_water_mb()
    del assignment
    return found


def _high_water_mb() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # on Linux, `getrusage` starts at the parent's peak
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024 // 10**6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit // 10**6


def against_shardy(name: str, options: Options, layers: int, *, scan: bool) -> Row:
    """The figures of one model."""
    step = Step(config=options.model(layers, scan=scan), axes=options.axes)
    with sharding.mesh(options.axes, devices=_num_devices(options.axes)) as mesh:
        traced = Traced.of(step, mesh)
        assignment = traced.complete()
        change = change_seconds(assignment, next(iter(options.axes)), options.rounds)
        shardy = Shardy(step)
    ours, other = alternate(lambda: seconds(traced.complete), shardy.seconds, options.rounds)
    ours_seconds = statistics.median(ours)
    return {
        "kind": "propagation",
        "name": name,
        "equations": traced.num_equations,
        "values": len(assignment.specs),
        **Ratio.of_pairs(ours, other).as_row(),
        "ours_seconds": rounded(ours_seconds),
        "shardy_seconds": rounded(statistics.median(other)),
        "microseconds_per_equation": rounded(1e6 * ours_seconds / traced.num_equations),
        "change_seconds": rounded(change),
        "peak_mb": peak_mb(step),
    }


def compiling(options: Options) -> Row:
    """Compile times of a small step with and without the inferred constraints, and facts about both programs."""
    config = gpt.PRESETS["gpt-tiny"]
    axes = dict.fromkeys(options.axes, 2)
    step = Step(config=config, axes=axes, batch=16)
    with sharding.mesh(axes, devices=jax.devices()[: _num_devices(axes)]):
        ours, shardy = (step.jitted(engine).complete(*step.arguments()) for engine in ("sharding", "shardy"))

        def compile_seconds(engine: str) -> float:
            jax.clear_caches()
            # Lowered again each time, as the lowered object caches its executable.
            lowered = step.jitted(engine).lower(*step.arguments())
            return seconds(lowered.compile, time.perf_counter)

        both = alternate(lambda: compile_seconds("sharding"), lambda: compile_seconds("xla"), options.rounds)
        facts = {
            engine: facts_of(step.jitted(engine).lower(*step.arguments()).compile()) for engine in ("sharding", "xla")
        }
    return {
        "kind": "compile time",
        "name": "gpt-tiny, with over without constraints",
        **Ratio.of_pairs(*both).as_row(),
        "completed_seconds": rounded(statistics.median(both[0])),
        "left_out_seconds": rounded(statistics.median(both[1])),
        "completed": facts["sharding"],
        "left_out": facts["xla"],
        "values_sharded_differently_than_by_shardy": len(sharding.compare(ours, shardy)),
    }


def _num_devices(axes: dict[str, int]) -> int:
    count = 1
    for size in axes.values():
        count *= size
    return count


def summary(result: Result) -> str:
    """The deepest model, unrolled and scanned, and the compile time."""
    *_, unrolled, scanned = result.of_kind("propagation")
    (compiled,) = result.of_kind("compile time")
    models = [
        f"{row['name']} ({row['equations']:,} equations): {row['ours_seconds']:.2g} s, "
        f"{Ratio.of_row(row)} of Shardy's time"
        for row in (unrolled, scanned)
    ]
    compile_time = f"compile time of a small step {Ratio.of_row(compiled)} of that without constraints"
    spread = unknown(Ratio.of_row(row) for row in (unrolled, scanned, compiled))
    return "; ".join([*models, compile_time]) + spread


def main(options: Options) -> None:
    """Measures, prints the ratios, and writes them to the file of `--json`."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    deepest = max(options.layers)
    models = {f"{n} layers": (n, False) for n in sorted(options.layers)} | {f"{deepest} scanned": (deepest, True)}
    rows: list[Row] = []
    heads = f"{'ours / Shardy':<36}{'ours':>12}{'Shardy':>12}{'us / eqn':>10}{'change':>12}{'MB':>6}"
    print(f"{'':<14}{'equations':>10}  {heads}")
    for name, (layers, scan) in models.items():
        row = against_shardy(name, options, layers, scan=scan)
        rows.append(row)
        times = "".join(f"{1e3 * row[key]:>9.1f} ms" for key in ("ours_seconds", "shardy_seconds"))
        change = f"{1e3 * row['change_seconds']:.1f} ms"
        print(
            f"{name:<14}{row['equations']:>10}  {Ratio.of_row(row)!s:<36}{times}"
            f"{row['microseconds_per_equation']:>10.1f}{change:>12}{row['peak_mb']:>6}"
        )
    compiled = compiling(options)
    print(f"compile time, with / without constraints: {Ratio.of_row(compiled)}")
    print(f"values sharded differently from Shardy: {compiled['values_sharded_differently_than_by_shardy']}")
    print(f"compiled with constraints:    {compiled['completed']}")
    print(f"compiled without constraints: {compiled['left_out']}")
    result = measured("propagation", options, [*rows, compiled], num_devices=_num_devices(options.axes))
    print(result.where)
    if options.json is not None:
        result.save(options.json)


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
