"""FSDP and tensor parallelism as tunix' authors write it, with specs of activations, and by propagation alone.

Tunix' modules constrain their activations by a `ShardingConfig`. Without these constraints, the specs of weights and
batch must lead to a program that sends at most a tenth more than theirs, as XLA partitions it, under the H100 compiler.
"""

import importlib.util
import math
import warnings

import jax
import pytest
from jax.sharding import NamedSharding

import corpus
import sharding
from sharding import P, cost
from sharding.mesh import current, tracing_context

SIZES = {"data": 2, "fsdp": 2, "model": 2}
AXES = {"tp": ("model",), "fsdp": ("data", "fsdp")}
"""Tunix' name of an axis -> ours."""
MOST = 1.1
PROGRAMS = (
    "llama 3.2 1b",
    "llama 3.2 1b, 16 bits, remat",
    "gemma 2 2b, evaluation",
    "gemma 3 1b, lora, remat",
    "qwen 3 0.6b",
    "qwen 3, experts",
)


def constrained(x, spec):
    """What tunix' `shard` does on accelerators, with the axes of our mesh that divide the dims."""

    def entry(size, names):
        names = (names,) if isinstance(names, str) else names or ()
        axes = tuple(axis for name in names if name for axis in AXES[name])
        return axes if axes and size % math.prod(SIZES[a] for a in axes) == 0 else None

    spec = P(*(entry(size, names) for size, names in zip(x.shape, spec, strict=False)))
    return jax.lax.with_sharding_constraint(x, NamedSharding(current(), spec))


def sent_bytes(make, engine):
    jax.clear_caches()
    with sharding.mesh(SIZES, devices=cost.compile_only("h100:1x8")):
        with tracing_context():
            step = make(SIZES)
        jitted = sharding.jit(step.run, in_shardings=step.specs, donate_argnums=0, engine=engine)
        return cost.read_compiled(jitted.lower(*step.args).compile()).sent_bytes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif("tunix_models" in corpus.missing(), reason="no tunix")
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="no jax_cuda13_plugin")
@pytest.mark.parametrize("name", PROGRAMS)
def test_propagation_sends_as_little_as_the_authors_layout(name, monkeypatch):
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = corpus.adapter("tunix_models").PROGRAMS[name]
        ours = sent_bytes(make, "sharding")
        for package in ("gemma", "llama3", "qwen3"):
            monkeypatch.setattr(f"tunix.models.{package}.model.shard", constrained)
        monkeypatch.setattr("tunix.utils.sharding_utils.shard", constrained)
        theirs = sent_bytes(make, "xla")
    assert 0 < ours <= MOST * theirs
