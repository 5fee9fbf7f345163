"""Our plans and those of XLA's own auto-sharding for the same step, compiled by one compiler.

A plan is more than the shardings of the arguments. XLA's is read as the compiler that planned compiled it, with the
shardings of all values; ours is compiled as `sharding.jit(step, plan=plan)`, which constrains what propagation would
infer otherwise. Both are also compiled as the `in_shardings` of a plain `jax.jit`, with the state returned as it came,
and XLA's completed by `sharding.jit`: by one compiler, without what either planned for other values.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import sharding
from sharding import cost, planner
from sharding.xla import read_hlo

from .peers import plain_gpt
from .peers.environment import auto_sharding_python
from .result_file import Row

SCRIPT = Path(__file__).parent / "peers" / "xla_auto_sharding.py"
OURS, THEIRS = "sharding.plan", "XLA's auto-sharding"
Stepped = Callable[[plain_gpt.Sizes, Any, Mesh], tuple[Any, tuple[Any, ...]]]
"""(sizes, plan, mesh) -> the step and its arguments."""


def rows(sizes: plain_gpt.Sizes, budget_gb: int, *, devices: str, axes: dict[str, int], peer: Path) -> Iterator[Row]:
    """The figures of both plans of one step; none if XLA's auto-sharding does not run here.

    Args:
        sizes: of the model.
        budget_gb: the memory that a plan may take. 0 is XLA's default, 1.1 times its lower bound; then ours may take no
            more than its plan does, both as we predict.
        devices: to plan for.
        axes: the mesh.
        peer: the folder of XLA's environment and of the plans that it made before.
    """
    theirs = their_plan(sizes, budget_gb, devices, axes, peer)
    if theirs is None:
        return
    program = {"kind": "plan", "layers": sizes.layers, "budget_gb": budget_gb, "devices": devices, "mesh": axes}
    module = read_hlo(theirs["text"], mesh=axes)
    times = {"seconds": "planning_seconds", "cpu_seconds": "planning_cpu_seconds"}
    spent = {name: theirs["planning"][key] - theirs["telling"][key] for key, name in times.items()}
    text = {"name": f"{THEIRS}, as it compiled it", "compiler": "libtpu 0.0.37", **spent}
    yield {**program, **text, **traffic(module), "peak_bytes": theirs["peak_bytes"]}
    specs = [P(*(tuple(e) if isinstance(e, list) else e for e in spec)) for spec in theirs["specs"]]
    yield {**program, "name": f"{THEIRS}, in_shardings", **spent, **compiled(sizes, plain_step, specs, devices, axes)}
    name = f"{THEIRS}, in_shardings, completed by sharding.jit"
    predicted = predictions(sizes, specs, devices, axes)
    yield {**program, "name": name, **spent, **predicted, **compiled(sizes, completed_step, specs, devices, axes)}

    begun, cpu = time.perf_counter(), time.process_time()
    limit = budget_gb * 1e9 if budget_gb else predicted["predicted_peak_bytes"]
    step, args = unplanned_step(sizes)
    try:
        plan = sharding.plan(step, *args, devices=devices, mesh=axes, memory_bytes=limit)
    except sharding.ShardingError as error:
        yield {**program, "name": OURS, "error": str(error)}
        return
    spent = dict(zip(times.values(), (time.perf_counter() - begun, time.process_time() - cpu), strict=True))
    yield {
        **program,
        "name": f"{OURS}, in_shardings",
        **spent,
        **compiled(sizes, plain_step, own_specs(plan), devices, axes),
    }
    predicted = {"estimated_seconds": plan.costs.seconds, "predicted_peak_bytes": plan.costs.peak_bytes}
    yield {**program, "name": OURS, **spent, **predicted, **compiled(sizes, planned_step, plan, devices, axes)}


def unplanned_step(sizes: plain_gpt.Sizes, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """The step as a new function, which nothing has traced, and its arguments."""
    return sharding.jit(plain_gpt.train_step(sizes), donate_argnums=0, **options), plain_gpt.arguments(sizes)


def planned_step(sizes: plain_gpt.Sizes, plan: planner.Plan, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """The step with a plan."""
    return unplanned_step(sizes, plan=plan)


def completed_step(sizes: plain_gpt.Sizes, specs: list[P], mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """The step whose other shardings we infer."""
    tree = jax.tree.structure(plain_gpt.arguments(sizes))
    return unplanned_step(sizes, in_shardings=jax.tree.unflatten(tree, specs))


def plain_step(sizes: plain_gpt.Sizes, specs: list[P], mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """The step whose other shardings the compiler infers."""
    args = plain_gpt.arguments(sizes)
    state, tokens = jax.tree.unflatten(jax.tree.structure(args), [NamedSharding(mesh, spec) for spec in specs])
    outs = (state, NamedSharding(mesh, P()))
    step = plain_gpt.train_step(sizes)
    return jax.jit(step, in_shardings=(state, tokens), out_shardings=outs, donate_argnums=0), args


def own_specs(plan: planner.Plan) -> list[P]:
    """A plan's specs of the arguments."""
    return [spec for _, spec in plan.arguments]


def compiled(sizes: plain_gpt.Sizes, stepped: Stepped, plan: Any, devices: str, axes: dict[str, int]) -> Row:
    """What a step that is sharded by a plan, or by the specs of its arguments, sends and holds on each device.

    An `error` if it needs more memory than a device has.
    """
    over = sharding.mesh(axes, devices=cost.compile_only(devices))
    with over:
        step, args = stepped(sizes, plan, over.mesh)
        try:
            program = step.lower(*args).compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return {"compiler": tpu_compiler(), "error": "needs more memory than a device has"}
    found = cost.read_compiled(program, mesh=axes)
    return {"compiler": tpu_compiler(), **traffic(found), "peak_bytes": program.memory_analysis().peak_memory_in_bytes}


def predictions(sizes: plain_gpt.Sizes, specs: list[P], devices: str, axes: dict[str, int]) -> Row:
    """What we predict of the step whose other shardings we infer."""
    with sharding.mesh(axes, devices=devices) as mesh:
        step, args = completed_step(sizes, specs, mesh)
        completion = step.complete(*args)
        seconds, peak = completion.estimate().seconds, completion.memory().peak_bytes
    return {"estimated_seconds": seconds, "predicted_peak_bytes": peak}


def tpu_compiler() -> str:
    """The installed TPU compiler."""
    return f"libtpu {version('libtpu')}"


def traffic(found: Any) -> Row:
    """The bytes of the collectives of a compiled program."""
    kinds = {kind: {"count": count, "bytes": size} for kind, (count, size) in found.by_kind().items()}
    return {"collective_bytes": found.total_bytes, "sent_bytes": found.sent_bytes, "collectives": kinds}


def their_plan(sizes: plain_gpt.Sizes, budget_gb: int, devices: str, axes: dict[str, int], peer: Path) -> Any:
    """What `peers/xla_auto_sharding.py` prints, from a file where it ran before; None if it cannot run."""
    mesh = ",".join(f"{axis}={size}" for axis, size in axes.items())
    given = json.dumps(sizes._asdict())
    plans = peer / "plans"
    file = plans / f"{'-'.join(map(str, (*sizes, devices.replace(':', '-'), mesh, budget_gb)))}.json"
    if not file.exists():
        python = auto_sharding_python(peer)
        if python is None:
            return None
        command = [python, "-E", SCRIPT, given, "--devices", devices, "--mesh", mesh, "--budget-gb", str(budget_gb)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        plans.mkdir(parents=True, exist_ok=True)
        file.write_text(ran.stdout.splitlines()[-1])
    return json.loads(file.read_text())
