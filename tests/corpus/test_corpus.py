"""The adapters are listed, and the programs of packages that are installed can be completed."""

from pathlib import Path

import jax
import pytest

import corpus
import sharding
from sharding.mesh import tracing_context

HELPERS = {
    "__init__",
    "common",
    "keras_training",
    "nnx_training",
    "test_author_layouts",
    "test_corpus",
    "test_training",
}
SIZES = {"data": 2, "model": 4}
QUICK = ("equinox: mlp", "optax: lion")


def test_every_adapter_is_listed():
    files = {path.stem for path in Path(__file__).parent.glob("*.py")} - HELPERS
    assert files == set(corpus.ADAPTERS)


@pytest.mark.parametrize("name", QUICK)
def test_a_program_completes(name):
    check(name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapter", sorted(corpus.ADAPTERS))
def test_programs_of_an_adapter_complete(adapter):
    if adapter in corpus.missing():
        pytest.skip(f"not installed: {', '.join(corpus.missing()[adapter])}")
    package = corpus.adapter(adapter).PACKAGE
    for name in corpus.adapter(adapter).PROGRAMS:
        check(f"{package}: {name}")


def check(name):
    """A step returns its state as it got it, sharded alike, and its collectives and memory can be predicted."""
    with sharding.mesh(SIZES), jax.numpy_rank_promotion("allow"):
        with tracing_context():
            step = corpus.programs()[name](SIZES)
        completion = sharding.jit(step.run, in_shardings=step.specs, donate_argnums=0).complete(*step.args)
    assert completion.communication().lowered("gpu").total_bytes >= 0
    used = zip(jax.tree.leaves(step.args), completion.assignment.graph.inputs_used, strict=True)
    arguments = sum(leaf.size * leaf.dtype.itemsize for leaf, is_used in used if is_used) // 8
    assert completion.memory(platform="gpu").peak_bytes >= arguments > 0
