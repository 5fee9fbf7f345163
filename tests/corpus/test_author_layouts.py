"""FSDP and tensor parallelism as other authors write it, with specs of activations, and by propagation alone.

Tunix' modules constrain their activations by a `ShardingConfig`, MaxText's by logical axis rules. Without these
constraints, the specs of weights and batch must lead to a program that sends at most a tenth more than theirs, as XLA
partitions it, under the H100 compiler.
"""

import importlib.util
import math
import warnings
from functools import partial

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
TUNIX = (
    "llama 3.2 1b",
    "llama 3.2 1b, 16 bits, remat",
    "gemma 2 2b, evaluation",
    "gemma 3 1b, lora, remat",
    "qwen 3 0.6b",
    "qwen 3, experts",
)
MAXTEXT = {
    "llama 3.1 8b, 4 layers": {},
    "qwen 3 0.6b, fsdp": {},
    "mixtral 8x7b, 2 layers": {},
    "qwen 3 1.7b, 14 layers, unrolled": {"base_num_decoder_layers": 4},
    "mistral 7b, 8 layers, evaluation": {},
    "gemma 2 2b": {},
    "gpt oss 20b, 2 layers": {},
    "deepseek 2 16b, 3 layers": {},
}
"""Program -> what is changed of it."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="no jax_cuda13_plugin"),
]


def constrained(x, spec):
    """What tunix' `shard` does on accelerators, with the axes of our mesh that divide the dims."""

    def entry(size, names):
        names = (names,) if isinstance(names, str) else names or ()
        axes = tuple(axis for name in names if name for axis in AXES[name])
        return axes if axes and size % math.prod(SIZES[a] for a in axes) == 0 else None

    spec = P(*(entry(size, names) for size, names in zip(x.shape, spec, strict=False)))
    return jax.lax.with_sharding_constraint(x, NamedSharding(current(), spec))


def constraints(jaxpr):
    """How many equations of a program constrain an array."""
    found = 0
    for eqn in jaxpr.eqns:
        found += eqn.primitive.name == "sharding_constraint"
        inner = jax.tree.leaves(eqn.params, is_leaf=lambda one: hasattr(one, "eqns") or hasattr(one, "jaxpr"))
        found += sum(constraints(getattr(one, "jaxpr", one)) for one in inner if hasattr(one, "eqns"))
    return found


def without_constraints(run):
    """A function that constrains nothing: on Auto axes, flax and MaxText do it by one function of JAX."""

    def unconstrained(x, *_, **__):
        return x

    def fn(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.lax, "with_sharding_constraint", unconstrained)
            return run(*args)

    return fn


def sent_bytes(make, engine, change=lambda run: run):
    """Bytes that a device sends in the compiled program, and the number of constraints that its authors wrote.

    Args:
        make: mesh axis sizes -> program.
        engine: what completes it.
        change: function of the program -> the one to compile.
    """
    jax.clear_caches()
    with sharding.mesh(SIZES, devices=cost.compile_only("h100:1x8")):
        with tracing_context():
            step = make(SIZES)
            run = change(step.run)
            num_constraints = constraints(jax.make_jaxpr(run)(*step.args).jaxpr)
        jitted = sharding.jit(run, in_shardings=step.specs, donate_argnums=0, engine=engine)
        return cost.read_compiled(jitted.lower(*step.args).compile()).sent_bytes, num_constraints


@pytest.mark.skipif("tunix_models" in corpus.missing(), reason="no tunix")
@pytest.mark.parametrize("name", TUNIX)
def test_tunix(name, monkeypatch):
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = corpus.adapter("tunix_models").PROGRAMS[name]
        ours, num_ours = sent_bytes(make, "sharding")
        for package in ("gemma", "llama3", "qwen3"):
            monkeypatch.setattr(f"tunix.models.{package}.model.shard", constrained)
        monkeypatch.setattr("tunix.utils.sharding_utils.shard", constrained)
        theirs, num_theirs = sent_bytes(make, "xla")
    assert num_ours == 0 < num_theirs
    assert 0 < ours <= MOST * theirs


@pytest.mark.skipif("maxtext_models" in corpus.missing(), reason="no maxtext")
@pytest.mark.parametrize("name", MAXTEXT)
def test_maxtext(name):
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = partial(corpus.adapter("maxtext_models").PROGRAMS[name], **MAXTEXT[name])
        ours, num_ours = sent_bytes(make, "sharding", without_constraints)
        theirs, num_theirs = sent_bytes(make, "xla")
    assert num_ours == 0 < num_theirs
    assert 0 < ours <= MOST * theirs
