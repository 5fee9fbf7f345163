"""Gradients of gated layers on TPUs: what kernels of products compute of the gate again, such as its activation."""

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import check_compiled_temporaries, check_temporaries

ACTIVATIONS = {
    "SiLU": jax.nn.silu,
    "GELU": jax.nn.gelu,
    "ReLU": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}
SIZES = {"4 sequences": (4, 1024, 4096, 3.25), "16 sequences": (16, 1024, 1024, 4), "wide": (8, 2048, 2048, 4)}
"""Sequences, features, hidden features, and how many arrays of these are stored."""
LENGTH = 1024


def program(activation, sequences, features, hidden, count):
    def loss(weights, x):
        gate, up, down = weights
        y = (activation(x @ gate) * (x @ up)) @ down
        return (y.astype(jnp.float32) ** 2).sum()

    shapes = [(features, hidden)] * 2 + [(hidden, features), (sequences, LENGTH, features)]
    args = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    return lambda *args: jax.grad(loss, argnums=(0, 1))(args[:3], args[3]), args, count


def programs():
    for name, activation in ACTIVATIONS.items():
        for size, (sequences, features, hidden, count) in SIZES.items():
            found = program(activation, sequences, features, hidden, count)
            yield f"{name}, {size}", (found, 2 * sequences * LENGTH * hidden)


PROGRAMS = dict(programs())


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_gate_is_computed_again(name):
    check_temporaries(*PROGRAMS[name], parts=7)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_for_tpus_stores_no_more(name):
    check_compiled_temporaries(*PROGRAMS[name], parts=7)
