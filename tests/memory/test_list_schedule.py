"""The greedy schedule against its definition, and the memory of train steps that follows from it on TPUs."""

import random

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import compiled_temporary_bytes, floats, temporary_bytes

from sharding.memory.fusion import Kernel
from sharding.memory.instruction import Instruction
from sharding.memory.list_schedule import list_order


def random_kernels(generator: random.Random) -> list[Kernel]:
    kernels: list[Kernel] = []
    for _ in range(generator.randrange(2, 16)):
        operands = generator.sample(kernels, min(len(kernels), generator.randrange(3)))
        size = generator.choice([1, 2, 5, 9])
        role = "argument" if not operands and generator.random() < 0.3 else "unfusible"
        made = Instruction("x", role, [k.root for k in operands], (size,), 4 * size)
        kernels.append(Kernel(made, [made], made.operands))
    return kernels


@pytest.mark.parametrize("seed", range(40))
def test_what_frees_most_runs_next(seed):
    kernels = random_kernels(random.Random(seed))
    place = {kernel.root: k for k, kernel in enumerate(kernels)}
    sources = [[place[x] for x in kernel.operands] for kernel in kernels]
    results = [kernel.root for kernel in random.Random(seed).sample(kernels, 2)]
    order = list_order([[kernel] for kernel in kernels], sources, results)
    assert sorted(order) == list(range(len(kernels)))
    done: set[int] = set()

    def freed(k: int) -> float:
        if kernels[k].root.num_elements == 1:
            return float("inf")
        left = [x for x in dict.fromkeys(kernels[k].operands) if x not in results and x.role != "argument"]
        last = [x for x in left if all(j in done or j == k for j, own in enumerate(sources) if place[x] in own)]
        own = 0 if kernels[k].root.role == "argument" else kernels[k].root.num_bytes
        return sum(x.num_bytes for x in last) - own

    for k in order:
        ready = [j for j in range(len(kernels)) if j not in done and done.issuperset(sources[j])]
        assert k in ready and freed(k) == max(map(freed, ready))
        done.add(k)


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
def test_weights_gradients_run_before_the_next_layers(name):
    step, args, count = STEPS[name]
    assert temporary_bytes(step, args, "tpu") == pytest.approx(count * WHOLE, rel=0.02)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", STEPS)
def test_the_compiler_for_tpus_schedules_so(name):
    step, args, count = STEPS[name]
    assert compiled_temporary_bytes(step, args, "v5p:2x2x2") == pytest.approx(count * WHOLE, rel=0.02)
