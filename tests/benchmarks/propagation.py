"""What the completion pass costs beside Shardy's own on the same program: GPT train steps, measured in turns.

    python -m tests.benchmarks.propagation                    # GPT-3's size on 64 x 8 described devices, some minutes
    python -m tests.benchmarks.propagation --layers 6 12 --rounds 3 --json propagation.json

No array is ever made: shapes alone are traced, so one CPU will do for a model of 175 billion parameters. Timed are
  - ours: from the traced program to a spec for every value, the graph and the completion together;
  - Shardy's: `sdy-propagation-pipeline`, the passes by which XLA propagates, on the module that JAX lowers from the
    same step with the same annotations. Tracing, lowering and parsing the module are left out on both sides;
  - a change: what comes of one more annotation on a completed program, on one array of the state after another;
  - compiling a small step with every constraint that the completion decides, over leaving them out for XLA to infer.

Each ratio is the median over pairs of neighbouring runs, which a busy machine slows down alike; beside it stand the
quartiles of the pairs. The passes run on one core and are timed in its seconds, compiling by the clock. Times depend on
the machine, which is named beside them; on another one only ratios may be compared. `peak_mb` is the most that a fresh
process takes to trace and complete once, Python and JAX included.
"""

import gc
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
import tyro
from flax import nnx
from jaxlib.mlir import ir, passmanager

import sharding
from sharding import arguments, compat, graph, paths, propagation, tracing
from sharding.models import gpt, layouts
from sharding.spec import Dim, Spec, open_spec

from .step import facts_of, in_turns, machine, ratio

BATCH = 1536
FIGURES = ("ratio", "ours_seconds", "shardy_seconds")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model, the mesh and how often things are measured."""

    mesh: str = "data=64,tensor=8"
    """Axis sizes; axes are called data, fsdp and tensor."""
    layers: tuple[int, ...] = (6, 12, 24, 48, 96)
    """Depths of the unrolled model; the scanned one has the last."""
    features: int = 12_288
    heads: int = 96
    vocab: int = 50_304
    context: int = 2048
    rounds: int = 7
    """Runs timed of each."""
    json: Path | None = None
    """Where to write the figures."""

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
    """A train step with Adam, the shapes of its arguments and the few annotations of the layout."""

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
        annotated = layouts.annotate(params, layouts.gpt(self.axes))
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
    """A step as `graph.build` takes it."""

    jaxpr: Any
    asked: dict[str, Any]

    @staticmethod
    def of(step: Step, mesh: Any) -> "Traced":
        args = step.arguments()
        leaves, tree = jax.tree.flatten(args)
        names = [n for name, a in zip(("state", "tokens"), args, strict=True) for n in paths.of_tree(a, name)]
        traced = tracing.trace(step, leaves, tree, {}, ["state", "tokens"], "step")
        specs = arguments.per_leaf((None, layouts.batch(step.axes)), args, "in_shardings", "step")
        num_out = len(traced.out_avals)
        return Traced(
            jaxpr=traced.jaxpr,
            asked={
                "sizes": step.axes,
                "in_names": names,
                "out_names": [f"out/{i}" for i in range(num_out)],
                "in_pins": arguments.pins(specs, leaves, names, mesh, what="in_shardings", function="step"),
                "out_pins": [None] * num_out,
                "ties": tracing.ties(traced, leaves, tree, (0,), [False] * num_out),
            },
        )

    @property
    def num_equations(self) -> int:
        return _num_equations(compat.open_jaxpr(self.jaxpr))

    def complete(self) -> propagation.Assignment:
        """What is timed as ours."""
        return propagation.complete(graph.build(self.jaxpr, **self.asked), self.asked["sizes"])


def _num_equations(jaxpr: Any) -> int:
    """Equations, those of nested jaxprs counted at each call, and not the calls."""
    inner = [[compat.open_jaxpr(sub) for _, _, sub in compat.sub_jaxprs(eqn.params)] for eqn in jaxpr.eqns]
    return sum(sum(map(_num_equations, subs)) if subs else 1 for subs in inner)


# How they are measured.


def seconds(f: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> float:
    """How long a call takes, with the cycle collector at rest, as in `sharding.jit`."""
    gc.collect()
    gc.disable()
    begun = clock()
    f()
    took = clock() - begun
    gc.enable()
    return took


class Shardy:
    """Shardy's pass on a step that JAX has lowered."""

    def __init__(self, step: Step):
        self.module = step.jitted("xla").lower(*step.arguments()).compiler_ir()
        with self.module.context:
            self.text = self.module.operation.get_asm(enable_debug_info=True)

    def seconds(self) -> float:
        """One run of the pass, on a copy: the original is what JAX caches."""
        with self.module.context:
            copy = ir.Module.parse(self.text)
            passes = passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)")
            return seconds(lambda: passes.run(copy.operation))


def change_seconds(assignment: propagation.Assignment, axis: str, times: int) -> float:
    """The median time of one more annotation, each on another argument: its last dim is at least split by `axis`."""
    g = assignment.graph
    free = [v for v in g.inputs if g.shapes[v] and v not in g.pins]
    took = []
    for v in free[:: max(1, len(free) // times)][:times]:
        spec = Spec(dims=(*open_spec(len(g.shapes[v]) - 1).dims, Dim(axes=(axis,), open=True)))
        took.append(seconds(partial(assignment.with_pins, {v: graph.Pin(spec=spec, origin="change")})))
    return statistics.median(took)


def peak_mb(step: Step) -> int:
    """The most memory that a process has had which traces and completes a step, in MB."""
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
    if status.exists():  # what `getrusage` tells there begins at what the parent had
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024 // 10**6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit // 10**6


def against_shardy(options: Options, layers: int, *, scan: bool) -> dict[str, Any]:
    """The figures of one model."""
    step = Step(config=options.model(layers, scan=scan), axes=options.axes)
    with sharding.mesh(options.axes, devices=_num_devices(options.axes)) as mesh:
        traced = Traced.of(step, mesh)
        assignment = traced.complete()
        change = change_seconds(assignment, next(iter(options.axes)), options.rounds)
        shardy = Shardy(step)
    found = ratio(*in_turns(lambda: seconds(traced.complete), shardy.seconds, options.rounds))
    return {
        "equations": traced.num_equations,
        "values": len(assignment.specs),
        **dict(zip(FIGURES, (found.middle, found.ours_seconds, found.by_hand_seconds), strict=True)),
        "quartiles": (found.low, found.high),
        "microseconds_per_equation": 1e6 * found.ours_seconds / traced.num_equations,
        "change_seconds": change,
        "peak_mb": peak_mb(step),
    }


def compiling(options: Options) -> dict[str, Any]:
    """Compile times of a small step with and without the completed constraints, and what the two programs hold."""
    config = gpt.PRESETS["gpt-tiny"]
    axes = dict.fromkeys(options.axes, 2)
    step = Step(config=config, axes=axes, batch=16)
    with sharding.mesh(axes, devices=jax.devices()[: _num_devices(axes)]):
        ours, shardy = (step.jitted(engine).complete(*step.arguments()) for engine in ("sharding", "shardy"))

        def compile_seconds(engine: str) -> float:
            jax.clear_caches()
            lowered = step.jitted(engine).lower(*step.arguments())  # anew, as it keeps what it was compiled to
            return seconds(lowered.compile, time.perf_counter)

        both = in_turns(lambda: compile_seconds("sharding"), lambda: compile_seconds("xla"), options.rounds)
        facts = {
            engine: facts_of(step.jitted(engine).lower(*step.arguments()).compile()) for engine in ("sharding", "xla")
        }
    found = ratio(*both)
    return {
        "ratio": found.middle, "quartiles": (found.low, found.high), "completed_seconds": statistics.median(both[0]),
        "left_out_seconds": statistics.median(both[1]), "completed": facts["sharding"], "left_out": facts["xla"],
        "values_split_otherwise_than_by_shardy": len(sharding.compare(ours, shardy)),
    }  # fmt: skip


def _num_devices(axes: dict[str, int]) -> int:
    count = 1
    for size in axes.values():
        count *= size
    return count


def main(options: Options) -> None:
    """Measure, print the ratios, and write them where `--json` says."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    deepest = max(options.layers)
    models = {f"{n} layers": (n, False) for n in sorted(options.layers)} | {f"{deepest} scanned": (deepest, True)}
    figures = {}
    heads = f"{'ours / Shardy':>15}{'quartiles':>18}{'ours':>12}{'Shardy':>12}{'us / eqn':>10}{'change':>12}{'MB':>6}"
    print(f"{'':<14}{'equations':>10}{heads}")
    for name, (layers, scan) in models.items():
        found = figures[name] = against_shardy(options, layers, scan=scan)
        quartiles = f"{found['quartiles'][0]:.3f} to {found['quartiles'][1]:.3f}"
        times = "".join(f"{1e3 * found[key]:>9.1f} ms" for key in FIGURES[1:])
        per, mb = found["microseconds_per_equation"], found["peak_mb"]
        change = f"{1e3 * found['change_seconds']:.1f} ms"
        print(
            f"{name:<14}{found['equations']:>10}{found['ratio']:>15.3f}{quartiles:>18}{times}{per:>10.1f}{change:>12}{mb:>6}"
        )
    compiled = compiling(options)
    low, high = compiled["quartiles"]
    print(f"compile time, completed / left out: {compiled['ratio']:.2f}, quartiles {low:.2f} to {high:.2f}")
    print(f"values split otherwise than by Shardy: {compiled['values_split_otherwise_than_by_shardy']}")
    print(f"compiled, completed: {compiled['completed']}\ncompiled, left out:  {compiled['left_out']}")
    print(f"machine: {machine()}")
    if options.json is not None:
        asked = {name: value for name, value in asdict(options).items() if name != "json"}
        text = {"machine": machine(), "options": asked, "models": figures, "compiling": compiled}
        options.json.write_text(json.dumps(text, indent=2, default=float) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
