"""The time to analyse train steps of the largest models on 512 described v5p chips, without any device.

    python -m tests.benchmarks.scale                          # a minute
    python -m tests.benchmarks.scale --json scale.json
    python -m tests.benchmarks.scale --aot                    # also compiles for them: needs libtpu (extra tpu)

For GPT-3 (175 billion parameters), a mixture of experts with a trillion parameters that is defined here, and
`gpt-moe-1t`: the seconds to trace and complete the step, and for its ledger, memory report, estimate and page, each for
the first time in the process. Layers are scanned, so that the figures don't grow with depth; nothing is compiled.
`--aot` also compiles ahead of time with the TPU compiler and compares its peak memory with the prediction.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

import sharding
from sharding import P
from sharding.launch import workloads
from sharding.launch.config.model_config import ModelOptions
from sharding.launch.config.optimizer_config import Optimization
from sharding.models import layouts

from . import command_line
from .result_file import Result, measured

DEVICES = "v5p:8x8x8"
NUM_DEVICES = 512
SLOW = 10.0
"""The target in seconds for completion, ledger and memory report together."""


@dataclass(frozen=True)
class Options:
    """The programs and the output file."""

    aot: bool = False
    """Compile ahead of time for the chips, for the compiler's own peak memory."""
    only: Literal["all", "gpt3", "trillion", "experts"] = "all"
    """The program to analyse."""
    json: Path | None = None
    """Output file of the figures."""


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The figures of one program and the time of each analysis."""

    name: str
    num_parameters: int
    num_arguments: int
    num_values: int
    num_ops: int
    num_collectives: int
    collective_bytes: int
    peak_bytes: int
    estimated_seconds: float
    complete_seconds: float
    ledger_seconds: float
    memory_seconds: float
    estimate_seconds: float
    page_seconds: float
    compiled_peak_bytes: int | None = None
    compile_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """Completion, ledger and memory report together."""
        return self.complete_seconds + self.ledger_seconds + self.memory_seconds


Program = tuple[dict[str, int], Callable[..., Any], tuple[Any, ...], Any, Any]
"""Mesh, step, abstract arguments, their specs, and abstract parameters."""


def gpt3() -> Program:
    """GPT-3 with Megatron's layout over tensor and fully sharded over fsdp."""
    return of_the_command_line("gpt3-175b", {"fsdp": 64, "tensor": 8})


def experts_1t() -> Program:
    """A GPT with experts in every other layer, sharded over an expert axis and fully sharded over fsdp."""
    return of_the_command_line("gpt-moe-1t", {"fsdp": 8, "expert": 8, "tensor": 8})


def of_the_command_line(name: str, sizes: dict[str, int]) -> Program:
    """The train step of `sharding train`, with a batch of 512."""
    family, model = workloads.find(ModelOptions(name=name))
    workload = family.build(name, model, Optimization(), steps=1000, seed=0)
    args = workload.state_shapes, workload.batch_shapes(512)
    return sizes, workload.train_step, args, (None, layouts.batch(sizes)), workload.state_shapes.params


# A mixture of experts with top-2 routing. L layers, B batch, S sequence, M features, H heads, D head features,
# E experts, C capacity of an expert per sequence, F hidden features, V vocabulary, K = 2 experts of a token.
L, S, M, H, D, E, C, F, V = 52, 2048, 6144, 48, 128, 64, 80, 24_576, 51_200

EXPERTS = {
    "table": ((V, M), P("tensor", "data")),
    "qkv": ((L, 3, M, H, D), P(None, None, "data", "tensor")),
    "out": ((L, H, D, M), P(None, "tensor", None, "data")),
    "gate": ((L, M, E), P()),
    "up": ((L, E, M, F), P(None, "data", None, "tensor")),
    "down": ((L, E, F, M), P(None, "data", "tensor")),
}


def norm(x):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def attention(w, x_BSM):
    q, k, v = jnp.einsum("bsm,nmhd->nbshd", norm(x_BSM), w["qkv"])
    scores_BHST = jnp.einsum("bshd,bthd->bhst", q, k).astype(jnp.float32) / math.sqrt(D)
    causal = jnp.tril(jnp.ones((S, S), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(causal, scores_BHST, -1e30)).astype(x_BSM.dtype)
    return jnp.einsum("bshd,hdm->bsm", jnp.einsum("bhst,bthd->bshd", weights, v), w["out"])


def experts(w, x_BSM):
    x_BSM = norm(x_BSM)
    best_BSK, chosen = lax.top_k(jax.nn.softmax((x_BSM @ w["gate"]).astype(jnp.float32)), 2)
    chosen_BSKE = jax.nn.one_hot(chosen, E)
    flat = chosen_BSKE.reshape(x_BSM.shape[0], -1, E)
    place = (jnp.cumsum(flat, axis=1) * flat - 1).reshape(chosen_BSKE.shape).astype(jnp.int32)
    places_BSKEC = sharding.annotate(jax.nn.one_hot(place, C, dtype=x_BSM.dtype), P("data"))
    dispatch_BSEC = places_BSKEC.sum(2)
    combine_BSEC = jnp.einsum("bskec,bsk->bsec", places_BSKEC, best_BSK.astype(x_BSM.dtype))
    sent_EBCM = jnp.einsum("bsec,bsm->ebcm", dispatch_BSEC, x_BSM)
    sent_EBCM = sharding.annotate(sent_EBCM, P("data"))  # all-to-all to the experts, and back
    wide_EBCF = sharding.annotate(jnp.einsum("ebcm,emf->ebcf", sent_EBCM, w["up"]), P("data", None, None, "tensor"))
    back_EBCM = sharding.annotate(jnp.einsum("ebcf,efm->ebcm", jax.nn.gelu(wide_EBCF), w["down"]), P("data"))
    return jnp.einsum("ebcm,bsec->bsm", back_EBCM, combine_BSEC)


def loss(params, tokens):
    @jax.checkpoint
    def layer(x, w):
        x = sharding.annotate(x + attention(w, x), P("data"))
        return x + experts(w, x), None

    x = sharding.annotate(params["table"][tokens[:, :-1]], P("data"))
    x, _ = lax.scan(layer, x, {k: w for k, w in params.items() if k != "table"})
    logits = jnp.einsum("bsm,vm->bsv", norm(x), params["table"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def trillion() -> Program:
    """A trillion parameters, nearly all in experts, which are sharded over the data axis."""
    optimizer = optax.adamw(1e-4, mu_dtype=jnp.float32)

    def step(state, tokens):
        params, moments = state
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = {k: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for k, (shape, _) in EXPERTS.items()}
    state = params, jax.eval_shape(optimizer.init, params)
    specs = ({k: spec for k, (_, spec) in EXPERTS.items()}, None), P("data")
    args = state, jax.ShapeDtypeStruct((512, S + 1), jnp.int32)
    return {"data": 64, "tensor": 8}, step, args, specs, params


PROGRAMS = {
    "gpt3": ("GPT-3", gpt3),
    "trillion": ("a trillion parameters", trillion),
    "experts": ("gpt-moe-1t", experts_1t),
}


def analyse(name: str, program: Callable[[], Program], *, aot: bool) -> Analysis:
    """Completes a program, optionally compiles it, and times each analysis."""
    sizes, run, args, specs, params = program()
    with sharding.mesh(sizes, devices=DEVICES), tempfile.TemporaryDirectory() as folder:
        step = sharding.jit(run, in_shardings=specs, donate_argnums=(0,))
        c, complete_seconds = timed(lambda: step.complete(*args))
        ledger, ledger_seconds = timed(c.communication)
        memory, memory_seconds = timed(c.memory)
        estimate, estimate_seconds = timed(c.estimate)
        _, page_seconds = timed(lambda: c.report(Path(folder) / "page.html"))
    graph = c.assignment.graph
    compiled, compile_seconds = None, None
    if aot:
        with sharding.mesh(sizes, devices=sharding.cost.compile_only(DEVICES)):
            step = sharding.jit(run, in_shardings=specs, donate_argnums=(0,))
            compiled, compile_seconds = timed(lambda: step.lower(*args).compile())
    return Analysis(
        name=name,
        num_parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        num_arguments=len(graph.inputs),
        num_values=len(graph.shapes),
        num_ops=len(graph.ops),
        num_collectives=len(ledger),
        collective_bytes=ledger.total_bytes,
        peak_bytes=memory.peak_bytes,
        estimated_seconds=estimate.seconds,
        complete_seconds=complete_seconds,
        ledger_seconds=ledger_seconds,
        memory_seconds=memory_seconds,
        estimate_seconds=estimate_seconds,
        page_seconds=page_seconds,
        compiled_peak_bytes=None if compiled is None else sharding.cost.read_compiled(compiled).peak_bytes,
        compile_seconds=compile_seconds,
    )


def timed(f: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call and its time in seconds."""
    begun = time.perf_counter()
    return f(), time.perf_counter() - begun


def main(options: Options) -> None:
    """Analyses each program and prints its figures."""
    jax.config.update("jax_platforms", "cpu")
    found = []
    for key, (name, program) in PROGRAMS.items():
        if options.only not in ("all", key):
            continue
        one = analyse(name, program, aot=options.aot)
        found.append(one)
        print(
            f"{name}: {one.num_parameters / 1e9:,.1f} billion parameters in {one.num_arguments} arguments; on {DEVICES}"
        )
        print(f"  {one.num_values} values, {one.num_ops} ops, {one.num_collectives} collectives in the program")
        print(f"  complete {one.complete_seconds:.2f} s, ledger {one.ledger_seconds:.2f} s, memory "
              f"{one.memory_seconds:.2f} s: {one.seconds:.2f} s in total ({'under' if one.seconds < SLOW else 'over'} "
              f"{SLOW:.0f} s); estimate {one.estimate_seconds:.2f} s, page {one.page_seconds:.2f} s")  # fmt: skip
        print(f"  per step: {one.estimated_seconds:.1f} s, {one.collective_bytes / 1e9:.1f} GB of collectives, peak "
              f"memory {one.peak_bytes / 1e9:.1f} GB per device", flush=True)  # fmt: skip
        if one.compiled_peak_bytes is not None:
            peak = one.compiled_peak_bytes / 1e9
            print(f"  compiled in {one.compile_seconds:.0f} s: peak memory {peak:.1f} GB per device", flush=True)
    result = measured("scale", options, found, num_devices=NUM_DEVICES, platform_name="v5p")
    print(result.where)
    if options.json is not None:
        result.save(options.json)


def summary(result: Result) -> str:
    """Of each program, the time to predict, the predicted peak, and the compiler's time and peak if it ran."""

    def of(one: Analysis) -> str:
        text = f"{one.name} predicted in {one.seconds:.1f} s: {one.peak_bytes / 1e9:.1f} GB per device"
        if one.compiled_peak_bytes is None or one.compile_seconds is None:
            return text
        return f"{text}, compiled in {one.compile_seconds / 60:.0f} min: {one.compiled_peak_bytes / 1e9:.1f} GB"

    return "; ".join(of(Analysis(**row)) for row in result.rows)


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
