"""A kernel against its reference: on one device, on meshes, and under the compilers of TPUs and GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compilers

import sharding
from sharding import P, cost
from sharding.compat import HAS_MOSAIC_GPU

TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2}
"""Of values and gradients, relative to the largest: rounding of the results' dtype."""

MESHES: tuple[dict[str, int], ...] = ({"data": 2, "tensor": 4}, {"a": 2, "b": 2, "c": 2})
SIZES = (MESHES[0], pytest.param(MESHES[1], marks=pytest.mark.slow))
"""The same for `parametrize`: the second one with the slow tests."""

AHEAD_OF_TIME = [
    compilers.COMPILERS["tpu"],
    pytest.param("tpu", "v6e:2x4", marks=compilers.COMPILERS["tpu"].marks),
    compilers.COMPILERS["gpu"],
]
"""(platform, described devices) of the compilers of kernels."""


def interpreted() -> list[Any]:
    """The implementations that are interpreted on CPUs, as parameters of a test."""
    old = pytest.mark.skipif(not HAS_MOSAIC_GPU, reason="JAX 0.11 has today's GPU kernels")
    return ["mosaic_tpu", pytest.param("mosaic_gpu", marks=old)]


def with_gradients(f: Callable[..., Any], wrt: Sequence[int], seed: int = 0) -> Callable[..., Any]:
    """A function of values and gradients: of the results' product with random numbers."""

    def loss(*args: Any) -> Any:
        found = f(*args)
        floats = [x for x in jax.tree.leaves(found) if jnp.issubdtype(x.dtype, jnp.inexact)]
        rng = np.random.default_rng(seed)
        total = sum((x.astype(jnp.float32) * rng.standard_normal(x.shape).astype(np.float32)).sum() for x in floats)
        return total, found

    def both(*args: Any) -> Any:
        (_, found), gradients = jax.value_and_grad(loss, argnums=tuple(wrt), has_aux=True)(*args)
        return found, gradients

    return both


def assert_close(found: Any, expected: Any) -> None:
    """Both have the same shapes, dtypes and, within `TOLERANCES`, values; integers are equal."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, b)
            continue
        x, y = np.asarray(a, np.float32), np.asarray(b, np.float32)
        if x.size:
            np.testing.assert_allclose(x, y, rtol=0, atol=TOLERANCES[str(a.dtype)] * max(np.abs(y).max(), 1e-3))


def check(f: Callable[..., Any], reference: Callable[..., Any], args: Sequence[Any], wrt: Sequence[int]) -> None:
    """Values and gradients are those of the reference."""
    assert_close(with_gradients(f, wrt)(*args), jax.jit(with_gradients(reference, wrt))(*args))


def check_sharded(
    f: Callable[..., Any],
    reference: Callable[..., Any],
    args: Sequence[Any],
    wrt: Sequence[int],
    specs: Sequence[P],
    sizes: dict[str, int],
    most: dict[str, int],
) -> None:
    """On a mesh, values and gradients are those of the reference on one device, and the ledger is the compiled program.

    Args:
        f: the kernel.
        reference: plain JAX.
        args: its arguments.
        wrt: the arguments that have gradients.
        specs: the `in_shardings`.
        sizes: the mesh axes.
        most: kind of collective -> the most that the kernel's rule explains.
    """
    with sharding.mesh(sizes):
        step = sharding.jit(with_gradients(f, wrt), in_shardings=tuple(specs))
        completion, found = step.complete(*args), step(*args)
        compiled = cost.read_compiled(step.lower(*args).compile()).by_kind()
    assert_close(found, jax.jit(with_gradients(reference, wrt))(*args))
    predicted = completion.communication().lowered("cpu").by_kind()
    assert not completion.unknown
    assert predicted == compiled
    counts = {str(kind): count for kind, (count, _) in predicted.items()}
    assert all(count <= most.get(kind, 0) for kind, count in counts.items()), counts


def random_specs(shapes: Sequence[Sequence[int]], sizes: dict[str, int], seed: int) -> list[P]:
    """A spec per array, with each mesh axis on a random dim that it divides, or on none."""
    rng = np.random.default_rng(seed)
    specs = []
    for shape in shapes:
        dims: list[list[str]] = [[] for _ in shape]
        left = list(shape)
        for axis, size in sizes.items():
            d = int(rng.integers(-1, len(shape)))
            if d >= 0 and left[d] % size == 0:
                dims[d].append(axis)
                left[d] //= size
        specs.append(P(*(tuple(names) or None for names in dims)))
    return specs


def check_ahead_of_time(
    platform: str,
    described: str,
    f: Callable[..., Any],
    args: Sequence[Any],
    wrt: Sequence[int],
    specs: Sequence[P],
    most: dict[str, int],
) -> Any:
    """Returns the program that a compiler makes of values and gradients on 2 x 4 described devices.

    It has kernels, and the collectives of the ledger.
    """
    with sharding.mesh(MESHES[0], devices=cost.compile_only(described)):
        step = sharding.jit(with_gradients(f, wrt), in_shardings=tuple(specs))
        completion, compiled = step.complete(*args), step.lower(*args).compile()
    text, found = compiled.as_text(), cost.read_compiled(compiled).by_kind()
    assert any(call in text for call in ("tpu_custom_call", "mosaic_gpu", "__cudnn"))
    assert completion.communication().lowered(platform).by_kind() == found
    counts = {str(kind): count for kind, (count, _) in found.items()}
    assert all(count <= most.get(kind, 0) for kind, count in counts.items()), counts
    return compiled
