"""Which results reuse donated arguments: as `jax.jit` pairs them in its lowered program."""

import random
import re
import warnings

import jax
import jax.numpy as jnp

import sharding
from sharding.memory import usage

SHAPES = [jax.ShapeDtypeStruct(*one) for one in (((4,), "float32"), ((8,), "float32"), ((4,), "int32"))]


def paired_by_jax(fn, args, donated) -> dict[int, int]:
    """Result -> argument."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of donated arguments that no result reuses
        text = jax.jit(fn, donate_argnums=donated, keep_unused=True).lower(*args).as_text()
    head = text[text.index("@main(") : text.index("->", text.index("@main("))]
    found = re.findall(r"%arg(\d+): [^%]*?tf\.aliasing_output = (\d+)", head)
    return {int(result): int(argument) for argument, result in found}


def test_pairs_are_those_of_jax():
    num_pairs = num_free = 0
    for seed in range(24):
        generator = random.Random(seed)
        args = generator.choices(SHAPES, k=5)
        donated = tuple(sorted(generator.sample(range(5), generator.randrange(1, 6))))
        order = generator.sample(range(5), generator.randrange(2, 6))

        def fn(*xs, order=order, generator=generator):
            return [xs[k] + jnp.asarray(n, xs[k].dtype) for n, k in enumerate(order)]

        with sharding.mesh(data=1, devices=1):
            assignment = sharding.jit(fn, donate_argnums=donated).complete(*args).assignment
        found = usage(assignment, donated).aliases
        assert found == paired_by_jax(fn, args, donated), (seed, donated, order)
        num_pairs += len(found)
        num_free += len(order) - len(found)
    assert num_pairs > 30 and num_free > 15


def test_a_result_that_is_an_argument():
    for fn in (lambda x: (x + 1, x), lambda x: (x, x + 1), lambda x: (x, x)):
        with sharding.mesh(data=1, devices=1):
            assignment = sharding.jit(fn).complete(SHAPES[0]).assignment
        assert usage(assignment).aliases == {} and len(usage(assignment, [0]).aliases) == 1
