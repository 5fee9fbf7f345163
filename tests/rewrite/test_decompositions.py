"""Decompositions of a batch of matrices: each device those of its own, with the values of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compilers

import sharding
from sharding import P


def inverse_root(x):
    """The inverse fourth roots of Shampoo's statistics."""
    values, vectors = jnp.linalg.eigh(x @ x.mT)
    roots = jnp.einsum("...ij,...j->...ij", vectors, jnp.maximum(values, 1e-3) ** -0.25)
    return roots @ vectors.mT


def log_determinant(x):
    return jnp.linalg.slogdet(x)[1].sum()


def solution(x):
    return jnp.linalg.solve(x, x[..., :2])


def spectrum(x):
    return jnp.linalg.svd(x, compute_uv=False)


FUNCTIONS = [inverse_root, jax.grad(log_determinant), solution, spectrum]
SPECS = [P("data"), P(("data", "model")), P("data", "model"), P(None, None, "model")]


@pytest.mark.parametrize("f", FUNCTIONS)
@pytest.mark.parametrize("spec", SPECS)
def test_values_are_those_of_one_device(f, spec):
    x = np.random.default_rng(0).normal(size=(8, 8, 8)).astype(np.float32) + 4 * np.eye(8, dtype=np.float32)
    with sharding.mesh(data=2, model=4):
        found = sharding.jit(f, in_shardings=spec)(x)
    np.testing.assert_allclose(found, f(x), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(("backend", "described"), compilers.COMPILERS.values(), ids=compilers.COMPILERS)
@pytest.mark.parametrize("f", FUNCTIONS)
def test_no_compiler_gathers_the_batch(f, backend, described):
    x = jax.ShapeDtypeStruct((8, 3, 4, 4), "float32")
    sizes = {"data": 2, "model": 4}
    predicted, compiled = compilers.predicted_and_compiled(
        f, [x], backend, described, sizes, in_shardings=P(("data", "model"))
    )
    assert predicted == compiled
    assert predicted.keys() <= {"all-reduce"}  # of a sum over the batch
