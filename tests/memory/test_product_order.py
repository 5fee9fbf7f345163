"""The order of kernels by their products, and the memory of train steps that follows from it on TPUs."""

import random

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import compiled_temporary_bytes, floats, temporary_bytes

from sharding.memory.fusion import fuse
from sharding.memory.instruction import Instruction


def made(name: str, operands: list[Instruction], **facts) -> Instruction:
    role = "unfusible" if name in ("x", "dot_general") else "fusible"
    return Instruction(name, role, operands, (8, 8), 256, elementwise=role == "fusible", **facts)


@pytest.mark.parametrize("seed", range(40))
def test_operands_come_first(seed):
    generator, found = random.Random(seed), [made("x", [])]
    for _ in range(generator.randrange(2, 30)):
        name = generator.choice(["x", "dot_general", "mul", "add"])
        operands = generator.choices(found, k=2)
        found.append(made(name, operands, fuses_operands=name == "dot_general"))
    kernels = fuse(found, generator.sample(found, 2))
    roots = [kernel.root for kernel in kernels]
    assert len(set(roots)) == len(roots)
    for k, kernel in enumerate(kernels):
        assert set(roots[:k]).issuperset(kernel.operands)


def test_a_kernel_takes_the_place_of_its_product():
    """Not that of the update, after both gradients."""
    w, v, g = (made("x", []) for _ in range(3))
    first = made("dot_general", [g, w], fuses_operands=True)
    d = made("x", [g])
    second = made("dot_general", [d, v], fuses_operands=True)
    updates = [made("sub", [p, x]) for p, x in ((v, second), (w, first))]
    kernels = fuse([w, v, g, first, d, second, *updates], updates)
    assert [kernel.root for kernel in kernels] == [w, v, g, updates[1], d, updates[0]]


ROWS, SIZE = 16384, 4096
WHOLE = 4 * ROWS * SIZE


def network(params, x, y, activation):
    for w, b in params[:-1]:
        x = activation(x @ w + b[None])
    w, b = params[-1]
    return jnp.mean((x @ w + b[None] - y) ** 2)


def train(activation):
    """A step of SGD."""

    def step(params, x, y):
        grads = jax.grad(network)(params, x, y, activation)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step


def arguments(*sizes):
    params = [(floats(a, b), floats(b)) for a, b in zip(sizes, sizes[1:], strict=False)]
    return params, floats(ROWS, sizes[0]), floats(ROWS, sizes[-1])


STEPS = {
    "relu": (train(jax.nn.relu), arguments(1024, SIZE, SIZE, SIZE, 256), 3.53),
    "tanh": (train(jnp.tanh), arguments(1024, SIZE, SIZE, 256), 2.5),
    "ten classes": (train(jax.nn.relu), arguments(784, SIZE, SIZE, 10), 2.5),
}
"""A step, its arguments, and its temporaries in arrays of float32: inputs of activations, half a gradient of one, and
one of the outputs."""


@pytest.mark.parametrize("name", STEPS)
def test_weights_gradients_run_before_those_of_the_layers_below(name):
    step, args, count = STEPS[name]
    assert temporary_bytes(step, args, "tpu") == pytest.approx(count * WHOLE, rel=0.02)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", STEPS)
def test_the_compiler_for_tpus_schedules_so(name):
    step, args, count = STEPS[name]
    assert compiled_temporary_bytes(step, args, "v5p:2x2x2") == pytest.approx(count * WHOLE, rel=0.02)
