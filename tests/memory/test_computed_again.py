"""What kernels of products of XLA:TPU compute each, and from how many vector ops on one stores it for all."""

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import check_compiled_temporaries, check_temporaries

ROWS, SUMMED, COLUMNS = 8192, 4608, 512
LIMITS = {
    ("matrices", "bfloat16", 1): (6, 12),
    ("matrices", "bfloat16", 2): (1, 6),
    ("matrices", "float32", 1): (17, 28),
    ("matrices", "float32", 2): (9, 20),
    ("stacks", "bfloat16", 1): (10, 17),
    ("stacks", "bfloat16", 2): (4, 11),
    ("stacks", "float32", 1): (20, 34),
    ("stacks", "float32", 2): (13, 25),
    ("many columns", "bfloat16", 2): (4, 11),
    ("many columns", "float32", 1): (30, 60),
}
"""Kind of arrays, their type, how many are read -> ops that are few, and many."""


def program(kind, dtype, num_read, num_ops, num_products=2):
    """Products of what some ops compute of one array or two, and of a number for each row."""
    columns = 8 * COLUMNS if kind == "many columns" else COLUMNS
    stack = (16,) if kind == "stacks" else ()
    rows = (*stack, ROWS // 16 if stack else ROWS)
    more = [(SUMMED, columns)] * (num_products - 2)
    shapes = (*rows, SUMMED), (*rows, SUMMED), (*rows, 1), (*rows, columns), (SUMMED, columns), *more

    def apply(a, b, scale, u, *weights):
        x = a * b if num_read == 2 else a
        for k in range(num_ops):
            x = jnp.maximum(x, scale) if k % 2 else x * scale
        return jnp.tensordot(x, u, (tuple(range(len(rows))),) * 2), [x @ w for w in weights]

    return apply, [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


SEVERAL = {
    ("matrices", "bfloat16", 1): (2, 7),
    ("matrices", "float32", 1): (11, 18),
    ("stacks", "bfloat16", 1): (6, 12),
    ("stacks", "float32", 1): (15, 22),
    ("stacks", "float32", 2): (None, 2),
}
"""As above, for five products."""
PROGRAMS = {
    f"{' '.join(map(str, key))}, {'many' if is_many else 'few'}": (*program(*key, count), int(is_many))
    for key, counts in LIMITS.items()
    for is_many, count in enumerate(counts)
}
PROGRAMS |= {
    f"{' '.join(map(str, key))}, {'many' if is_many else 'few'}, five": (*program(*key, count, 5), int(is_many))
    for key, counts in SEVERAL.items()
    for is_many, count in enumerate(counts)
    if count is not None
}
UNIT = 2 * ROWS * SUMMED
"""The products read it in 16 bits."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_many_ops_are_computed_once(name):
    check_temporaries(PROGRAMS[name], UNIT, parts=2)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_the_compiler_for_tpus_does(name):
    check_compiled_temporaries(PROGRAMS[name], UNIT, parts=2)
