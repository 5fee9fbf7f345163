"""RMS norm (Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467), fused with its scale.

One pass over memory forward, one backward, which computes the mean square again instead of keeping it, or takes the
output in place of the input (`invertible_norm.py`). Gradients of the scale are summed in float32 over a device's rows,
then over devices.

Shape suffixes: M features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from . import row_kernel
from .implementation import ONE_PASS, XLA, Backend, Candidate, backend, choose
from .invertible_norm import invertible_norm, keeps_output
from .row_kernel import Along, RowKernel
from .saved_names import saved
from .with_rule import with_rule

IMPLEMENTATIONS = (
    Candidate(
        name="mosaic_tpu", platforms=frozenset({"tpu"}), obstacle=lambda x, _: obstacle("mosaic_tpu", x), why=ONE_PASS
    ),
    Candidate(
        name="mosaic_gpu", platforms=frozenset({"gpu"}), obstacle=lambda x, _: obstacle("mosaic_gpu", x), why=ONE_PASS
    ),
)


def rms_norm(
    x: jax.Array,
    scale_M: jax.Array,
    *,
    epsilon: float = 1e-6,
    keep: Literal["input", "output"] = "input",
    implementation: str = "auto",
) -> jax.Array:
    """`x / sqrt(mean(x^2) + epsilon) * scale` over the last dim, in float32.

    Args:
        x: [..., M], of a floating-point dtype.
        scale_M: [M].
        epsilon: added to the mean square.
        keep: what the derivative takes: the input, or the output, which the next matmul keeps anyway, and a number per
            row. Gradients are then NaN where a scale is 0, which can't be known when this is traced.
        implementation: `"mosaic_tpu"`, `"mosaic_gpu"`, `"xla"`, or `"auto"`: the kernel of the current mesh's platform.

    Returns:
        [..., M], in the dtype of `x`.

    Raises:
        ShardingError: the implementation, or what to keep, is unknown or can't take these arrays.

    Example:
        >>> import jax.numpy as jnp
        >>> from sharding import kernels
        >>> kernels.rms_norm(jnp.full((2, 4), 3.0), jnp.ones(4)).round(3)[0]
        Array([1., 1., 1., 1.], dtype=float32)
    """
    chosen = choose("rms_norm", IMPLEMENTATIONS, implementation, x, scale_M)
    if keeps_output("rms_norm", keep):
        return invertible_norm(x, scale_M, None, epsilon, chosen)
    if chosen == XLA:
        return saved(reference(saved(x, "norm_input"), scale_M, epsilon), "norm_output")
    return _rms_norm(x, scale_M, epsilon, chosen)


def reference(x: jax.Array, scale_M: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """RMS norm in plain JAX."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    scale = scale_M.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + scale_M.shape)
    return (wide * scale).astype(x.dtype)


def obstacle(implementation: str, x: Any) -> str:
    """Why a kernel can't run, or an empty text."""
    return row_kernel.obstacle(implementation, [x])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rms_norm(x: jax.Array, scale_M: jax.Array, epsilon: float, implementation: str) -> jax.Array:
    return _on_shards(epsilon, backend(implementation))(x, scale_M)


@functools.cache
def _on_shards(epsilon: float, compiler: Backend) -> Callable[..., Any]:
    def rms_norm(x: jax.Array, scale_M: jax.Array) -> jax.Array:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return _forward(epsilon)([x], [scale_M], [like], [], compiler)[0]

    return with_rule(rms_norm, "... m, m -> ... m", need_replication=["m"])


def _keep(x: jax.Array, scale_M: jax.Array, epsilon: float, implementation: str) -> tuple[jax.Array, Any]:
    x = saved(x, "norm_input")
    return saved(_rms_norm(x, scale_M, epsilon, implementation), "norm_output"), (x, scale_M)


def _gradients(epsilon: float, implementation: str, kept: Any, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, scale_M = kept
    of_x, of_scale = _gradients_on_shards(x.ndim - 1, epsilon, backend(implementation))(x, ct, scale_M)
    return of_x, of_scale.astype(scale_M.dtype)


@functools.cache
def _gradients_on_shards(num_rows: int, epsilon: float, compiler: Backend) -> Callable[..., Any]:
    def rms_norm_gradients(x: jax.Array, ct: jax.Array, scale_M: jax.Array) -> list[jax.Array]:
        like, total = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(scale_M.shape, jnp.float32)
        return _backward(epsilon)([x, ct], [scale_M], [like], [total], compiler)

    rows = " ".join(f"r{i}" for i in range(num_rows))
    rule = f"{rows} m, {rows} m, m -> {rows} m, m"
    return with_rule(rms_norm_gradients, rule, reduction=rows.split(), need_replication=["m"])


_rms_norm.defvjp(_keep, _gradients)


@functools.cache
def _forward(epsilon: float) -> RowKernel:
    def body(rows: Sequence[jax.Array], vectors: Sequence[jax.Array], along: Along) -> Any:
        (x,), (scale,) = rows, vectors
        rate = jax.lax.rsqrt(along.mean(x * x) + epsilon)
        return [x * rate * scale], []

    return RowKernel(name="rms_norm", body=body, flops_per_element=4)


@functools.cache
def _backward(epsilon: float) -> RowKernel:
    def body(rows: Sequence[jax.Array], vectors: Sequence[jax.Array], along: Along) -> Any:
        (x, ct), (scale,) = rows, vectors
        rate = jax.lax.rsqrt(along.mean(x * x) + epsilon)
        of_norm, norm = ct * scale, x * rate
        slope = along.mean(of_norm * norm)
        return [rate * (of_norm - norm * slope)], [ct * norm]

    return RowKernel(name="rms_norm_gradients", body=body, flops_per_element=11)
