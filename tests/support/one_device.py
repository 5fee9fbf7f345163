"""A program on a mesh against one device, the ledger and the compiled program."""

import jax
import numpy as np

import sharding
from sharding import cost

SIZES = {"data": 2, "tensor": 4}


def check(f, args, specs, expected, *, rtol=1e-5, atol=1e-5):
    """Returns the results on a mesh of 2 x 4; they must be those of one device.

    Args:
        f: a function of arrays, all of whose ops have rules.
        args: its arguments.
        specs: their `in_shardings`.
        expected: kind of collective -> count. The ledger has them, and as many bytes as the compiled program.
        rtol: relative tolerance of the results.
        atol: absolute tolerance.
    """
    with sharding.mesh(SIZES):
        step = sharding.jit(f, in_shardings=specs)
        completion, found = step.complete(*args), step(*args)
        compiled = cost.read_compiled(step.lower(*args).compile()).by_kind()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, jax.jit(f)(*args))
    predicted = completion.communication().lowered("cpu").by_kind()
    assert not completion.unknown
    assert {str(kind): count for kind, (count, _) in predicted.items()} == expected
    assert predicted == compiled
    return found
