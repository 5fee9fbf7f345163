"""`sharding.jit` compared with a hand-sharded `jax.jit` of the same GPT train step, in alternating runs.

    python -m tests.benchmarks.step                                     # 8 virtual CPU devices, a few minutes
    python -m tests.benchmarks.step --scan --mesh data=2,fsdp=2,tensor=2 --json step.json

Three ratios, ours over by hand, of alternating runs:
  - step: one optimizer step, from the call until the new state is ready;
  - first step: trace, complete, constrain, lower, compile and run once, with cleared caches;
  - dispatch: the asynchronous call alone, on programs too small to hide it.

By hand means a spec for every array of the state in `in_shardings` and `out_shardings`, and a constraint on the output
of each branch and on the logits. Ours has the layout of `sharding.models.layouts` and the spec of the batch. Both must
give equal losses, or the run fails. A ratio is the median over pairs of consecutive runs, which a busy machine slows
down equally, with the quartiles of the pairs. Times depend on the named machine; across machines compare only ratios.
"""

import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding

import sharding
from sharding import P, paths
from sharding.models import gpt, layouts

from . import calls, command_line
from .ratios import Ratio, rounded, unknown
from .result_file import Result, Row, measured

Kind = Callable[[calls.Arrays], tuple[calls.Timed, calls.Timed]]
Step = Callable[[Any, jax.Array], tuple[Any, jax.Array]]

BY_HAND = {
    "table": P("tensor", "fsdp"),
    "qkv": P("fsdp", "tensor", None, None),
    "out": P("tensor", None, "fsdp"),
    "w1": P("fsdp", "tensor"),
    "w2": P("tensor", "fsdp"),
    "scale": P(None),
}
"""Parameter -> full spec; optimizer moments are sharded as their parameter."""

COLLECTIVES = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
KIND_LEAVES = 100
"""Arrays of each kind of call."""
TOLERANCE = 1e-5
"""Relative tolerance of losses: the order of sums differs."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model, the mesh and the number of runs."""

    mesh: str = "data=2,tensor=4"
    """Axis sizes; the axes are named data, fsdp and tensor."""
    layers: int = 4
    features: int = 128
    heads: int = 8
    vocab: int = 256
    context: int = 128
    batch: int = 16
    scan: bool = False
    """Layers stacked and scanned instead of unrolled."""
    steps: int = 40
    """Timed steps of each."""
    first_steps: int = 9
    """Timed first steps of each, after one warm-up."""
    calls: int = 1000
    """Timed calls of each, per state size."""
    leaves: tuple[int, ...] = (10, 100, 400)
    """State sizes, in arrays, for dispatch."""
    json: Path | None = None
    """Output file of the figures."""

    @property
    def axes(self) -> dict[str, int]:
        return {name: int(size) for name, _, size in (part.partition("=") for part in self.mesh.split(","))}

    @property
    def model(self) -> gpt.Config:
        return gpt.Config(
            vocab=self.vocab, context=self.context, layers=self.layers, features=self.features, heads=self.heads,
            kv_heads=self.heads, mlp_features=4 * self.features, scan=self.scan,
        )  # fmt: skip


# The two programs.


def _optimizer() -> optax.GradientTransformation:
    return optax.adamw(1e-3)


def _graph(config: gpt.Config, **branches: Any) -> Any:
    return nnx.split(nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0), **branches)), nnx.Param)[0]


def _initial(config: gpt.Config, key: jax.Array) -> Any:
    params = nnx.state(gpt.GPT(config, rngs=nnx.Rngs(params=key)), nnx.Param)
    return params, _optimizer().init(params)


def _train_step(loss: Callable[[Any, jax.Array], jax.Array]) -> Step:
    def train_step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        nats, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, opt_state = _optimizer().update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), nats

    return train_step


def ours(config: gpt.Config, axes: dict[str, int]) -> Any:
    """The step with the annotations of the layout."""
    graph, layout = _graph(config), layouts.gpt(axes)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return gpt.next_token_loss(nnx.merge(graph, layout.annotate(params)), tokens)

    return sharding.jit(_train_step(loss), in_shardings=(None, layouts.batch(axes)), donate_argnums=(0,))


def _residual(x: jax.Array) -> jax.Array:
    batch = layouts.batch(jax.sharding.get_abstract_mesh().axis_names)
    return jax.lax.with_sharding_constraint(x, P(*batch, None, None))


class HandAttention(gpt.Attention):
    def __call__(self, x_BSM: jax.Array) -> jax.Array:
        return _residual(super().__call__(x_BSM))


class HandMLP(gpt.MLP):
    def __call__(self, x_BSM: jax.Array) -> jax.Array:
        return _residual(super().__call__(x_BSM))


def by_hand(config: gpt.Config, axes: dict[str, int], mesh: Any) -> Any:
    """The step with explicit shardings for plain `jax.jit`."""
    graph = _graph(config, attention=HandAttention, mlp=HandMLP)
    logits_spec = P(*layouts.batch(axes), None, "tensor" if "tensor" in axes else None)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        return gpt.loss(jax.lax.with_sharding_constraint(logits, logits_spec), tokens[:, 1:])

    shardings, replicated = hand_shardings(config, axes, mesh), NamedSharding(mesh, P())
    return jax.jit(
        _train_step(loss),
        in_shardings=(shardings, NamedSharding(mesh, layouts.batch(axes))),
        out_shardings=(shardings, replicated),
        donate_argnums=(0,),
    )


def hand_shardings(config: gpt.Config, axes: dict[str, int], mesh: Any) -> Any:
    """A tree of shardings with the structure of the state."""

    def sharding_of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        spec = BY_HAND.get(paths.text(path).rpartition("/")[2], P())
        entries = [axis if axis in axes else None for axis in spec]
        return NamedSharding(mesh, P(*[None] * (leaf.ndim - len(entries)), *entries))

    return jax.tree_util.tree_map_with_path(sharding_of, _state_shapes(config))


def _state_shapes(config: gpt.Config) -> Any:
    return jax.eval_shape(partial(_initial, config), jax.random.key(0))


# How they are measured.


def alternate(
    a: Callable[[], float], b: Callable[[], float], times: int, stretch: int = 1
) -> tuple[list[float], list[float]]:
    """Results of `times` calls of `a` and of `b`, in alternating stretches; the order within a pair alternates too."""
    of_a: list[float] = []
    of_b: list[float] = []
    for i in range(times // stretch):
        for run, found in ((a, of_a), (b, of_b)) if i % 2 else ((b, of_b), (a, of_a)):
            found += [run() for _ in range(stretch)]
    return of_a, of_b


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Our time over the hand-sharded one, and the median times in seconds."""

    ratio: Ratio
    ours_seconds: float
    by_hand_seconds: float

    @classmethod
    def of(cls, mine: Sequence[float], hand: Sequence[float]) -> "Comparison":
        """Of consecutive runs."""
        ours_seconds, by_hand_seconds = (rounded(statistics.median(seconds)) for seconds in (mine, hand))
        return cls(ratio=Ratio.of_pairs(mine, hand), ours_seconds=ours_seconds, by_hand_seconds=by_hand_seconds)

    def as_row(self, name: str) -> Row:
        times = {"ours_seconds": self.ours_seconds, "by_hand_seconds": self.by_hand_seconds}
        return {"kind": "ratio", "name": name, **self.ratio.as_row(), **times}


class _Run:
    """A train step with its state, tokens and losses."""

    def __init__(self, step: Step, state: Any, tokens: Any):
        self.step, self.state, self.tokens = step, state, tokens
        self.losses: list[float] = []

    def once(self) -> float:
        begun = time.perf_counter()
        self.state, loss = self.step(self.state, self.tokens)
        jax.block_until_ready((self.state, loss))
        seconds = time.perf_counter() - begun
        self.losses.append(float(loss))
        return seconds


def _tokens(options: Options) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, options.vocab, (options.batch, options.context + 1), dtype=np.int32)


def _started(step: Any, shardings: Any, options: Options, mesh: Any) -> _Run:
    tokens = jax.device_put(_tokens(options), NamedSharding(mesh, layouts.batch(options.axes)))
    return _Run(step, jax.jit(partial(_initial, options.model), out_shardings=shardings)(jax.random.key(0)), tokens)


def step_time(options: Options, mesh: Any) -> tuple[Comparison, dict[str, Any]]:
    """The ratio of step times, and facts about the two programs."""
    config, axes = options.model, options.axes
    mine, hand = ours(config, axes), by_hand(config, axes, mesh)
    shardings = hand_shardings(config, axes, mesh)
    runs = [_started(mine, shardings, options, mesh), _started(hand, shardings, options, mesh)]
    for run in runs:
        run.once()
    times = alternate(runs[0].once, runs[1].once, options.steps)
    np.testing.assert_allclose(runs[0].losses, runs[1].losses, rtol=TOLERANCE)
    completion = mine.complete(runs[0].state, runs[0].tokens)
    pairs = zip(jax.tree.leaves(completion.in_shardings[0]), jax.tree.leaves(shardings), strict=True)
    facts = {
        "last_loss": {"ours": runs[0].losses[-1], "by_hand": runs[1].losses[-1]},
        "state_arrays_sharded_differently": sum(not _same(mesh, a, b) for a, b in pairs),
        "ours": facts_of(mine.lower(runs[0].state, runs[0].tokens).compile()),
        "by_hand": facts_of(hand.lower(runs[1].state, runs[1].tokens).compile()),
    }
    return Comparison.of(*times), facts


def _same(mesh: Any, spec: P, other: NamedSharding) -> bool:
    return NamedSharding(mesh, spec).is_equivalent_to(other, max(len(spec), len(other.spec)))


def facts_of(compiled: Any) -> dict[str, Any]:
    """The collectives of a compiled program by kind, its number of fusions and its temporary memory."""
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    return {
        "collectives": dict(sorted(Counter(COLLECTIVES.findall(text)).items())),
        "fusions": len(re.findall(r" fusion\(", text)),
        "temp_bytes": memory.temp_size_in_bytes,
    }


def first_step(options: Options, mesh: Any) -> Comparison:
    """The ratio of times from tracing to the first loss, without the first round of each."""
    config, axes = options.model, options.axes
    shardings = hand_shardings(config, axes, mesh)

    def fresh(make: Callable[[], Any]) -> float:
        jax.clear_caches()
        run = _started(make(), shardings, options, mesh)
        jax.block_until_ready(run.state)
        return run.once()

    mine, hand = alternate(
        lambda: fresh(lambda: ours(config, axes)),
        lambda: fresh(lambda: by_hand(config, axes, mesh)),
        options.first_steps + 1,
    )
    return Comparison.of(mine[1:], hand[1:])


def dispatch(options: Options, mesh: Any, num_leaves: int, kind: Kind = calls.donated_state) -> Comparison:
    """The ratio of dispatch times of a kind of call with `num_leaves` small arrays, each scaled and shifted.

    In stretches of ten calls, as a training loop calls its step: another program in between evicts the CPU caches.
    """
    mine, hand = kind(calls.Arrays(number=num_leaves, spec=P(next(iter(options.axes)), None), mesh=mesh))
    for _ in range(3):
        mine(), hand()
    return Comparison.of(*alternate(mine, hand, options.calls, stretch=10))


# Output.


def printed(found: dict[str, Comparison]) -> Iterator[str]:
    """The printed lines."""
    yield f"{'':<42}{'ratio':<36}{'ours':>14}{'by hand':>14}"
    for name, each in found.items():
        times = "".join(f"{1e3 * seconds:>11.2f} ms" for seconds in (each.ours_seconds, each.by_hand_seconds))
        yield f"{name:<42}{each.ratio!s:<36}{times}"


def summary(result: Result) -> str:
    """The ratios, and whether the two programs are the same."""
    programs = result.named("programs", "programs")
    ratios = {row["name"]: Ratio.of_row(row) for row in result.of_kind("ratio")}
    texts = [f"{name}: {ratio}" for name, ratio in ratios.items()]
    same = [name for name in ("collectives", "fusions") if programs["ours"][name] == programs["by_hand"][name]]
    facts = f"same {' and '.join(same)}" if same else "other collectives and fusions"
    return f"{'; '.join(texts)}; {facts}{unknown(ratios.values())}"


@contextmanager
def _mesh(axes: dict[str, int]) -> Iterator[Any]:
    num_devices = int(np.prod(list(axes.values())))
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", num_devices)
    with sharding.mesh(axes, devices=jax.devices()[:num_devices]) as mesh:
        yield mesh


def main(options: Options) -> None:
    """Measures, prints the ratios, and writes them to the file of `--json`."""
    with _mesh(options.axes) as mesh:
        found: dict[str, Comparison] = {}
        found["step"], facts = step_time(options, mesh)
        for count in options.leaves:
            found[f"dispatch, {count} arrays"] = dispatch(options, mesh, count)
        for name, kind in calls.KINDS.items():
            found[f"dispatch, {KIND_LEAVES} arrays, {name}"] = dispatch(options, mesh, KIND_LEAVES, kind)
        found["first step"] = first_step(options, mesh)
        rows = [*(each.as_row(name) for name, each in found.items()), {"kind": "programs", "name": "programs", **facts}]
        result = measured("step", options, rows, num_devices=mesh.size)
    print("\n".join(printed(found)))
    print(f"losses {facts['last_loss']}, arrays sharded differently: {facts['state_arrays_sharded_differently']}")
    print(f"compiled, ours:    {facts['ours']}")
    print(f"compiled, by hand: {facts['by_hand']}")
    print(result.where)
    if options.json is not None:
        result.save(options.json)


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
