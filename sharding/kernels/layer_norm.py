"""Layer norm (Ba, Kiros and Hinton, Layer Normalization, arXiv:1607.06450), fused with its scale and bias.

One pass over memory forward, one backward, which computes mean and variance again instead of keeping them, or takes the
output in place of the input (`invertible_norm.py`). Gradients of scale and bias are summed in float32 over a device's
rows, then over devices.

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
        name="mosaic_tpu", platforms=frozenset({"tpu"}), obstacle=lambda x, *_: obstacle("mosaic_tpu", x), why=ONE_PASS
    ),
    Candidate(
        name="mosaic_gpu", platforms=frozenset({"gpu"}), obstacle=lambda x, *_: obstacle("mosaic_gpu", x), why=ONE_PASS
    ),
)


def layer_norm(
    x: jax.Array,
    scale_M: jax.Array,
    bias_M: jax.Array,
    *,
    epsilon: float = 1e-6,
    keep: Literal["input", "output"] = "input",
    implementation: str = "auto",
) -> jax.Array:
    """`(x - mean(x)) / sqrt(variance(x) + epsilon) * scale + bias` over the last dim, in float32.

    Args:
        x: [..., M], of a floating-point dtype.
        scale_M: [M].
        bias_M: [M].
        epsilon: added to the variance.
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
        >>> kernels.layer_norm(jnp.array([1.0, 3.0]), jnp.ones(2), jnp.ones(2)).round(1)
        Array([0., 2.], dtype=float32)
    """
    chosen = choose("layer_norm", IMPLEMENTATIONS, implementation, x, scale_M, bias_M)
    if keeps_output("layer_norm", keep):
        return invertible_norm(x, scale_M, bias_M, epsilon, chosen)
    if chosen == XLA:
        return saved(reference(saved(x, "norm_input"), scale_M, bias_M, epsilon), "norm_output")
    return _layer_norm(x, scale_M, bias_M, epsilon, chosen)


def reference(x: jax.Array, scale_M: jax.Array, bias_M: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """Layer norm in plain JAX."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    shape = (1,) * (x.ndim - 1) + scale_M.shape
    return (wide * scale_M.astype(jnp.float32).reshape(shape) + bias_M.astype(jnp.float32).reshape(shape)).astype(
        x.dtype
    )


def obstacle(implementation: str, x: Any) -> str:
    """Why a kernel can't run, or an empty text."""
    return row_kernel.obstacle(implementation, [x])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _layer_norm(x: jax.Array, scale_M: jax.Array, bias_M: jax.Array, epsilon: float, implementation: str) -> jax.Array:
    return _on_shards(epsilon, backend(implementation))(x, scale_M, bias_M)


@functools.cache
def _on_shards(epsilon: float, compiler: Backend) -> Callable[..., Any]:
    def layer_norm(x: jax.Array, scale_M: jax.Array, bias_M: jax.Array) -> jax.Array:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return _forward(epsilon)([x], [scale_M, bias_M], [like], [], compiler)[0]

    return with_rule(layer_norm, "... m, m, m -> ... m", need_replication=["m"])


def _keep(x: jax.Array, scale_M: jax.Array, bias_M: jax.Array, epsilon: float, implementation: str) -> Any:
    x = saved(x, "norm_input")
    return saved(_layer_norm(x, scale_M, bias_M, epsilon, implementation), "norm_output"), (x, scale_M, bias_M)


def _gradients(epsilon: float, implementation: str, kept: Any, ct: jax.Array) -> tuple[jax.Array, ...]:
    x, scale_M, bias_M = kept
    of_x, of_scale, of_bias = _gradients_on_shards(x.ndim - 1, epsilon, backend(implementation))(x, ct, scale_M)
    return of_x, of_scale.astype(scale_M.dtype), of_bias.astype(bias_M.dtype)


@functools.cache
def _gradients_on_shards(num_rows: int, epsilon: float, compiler: Backend) -> Callable[..., Any]:
    def layer_norm_gradients(x: jax.Array, ct: jax.Array, scale_M: jax.Array) -> list[jax.Array]:
        like, total = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(scale_M.shape, jnp.float32)
        return _backward(epsilon)([x, ct], [scale_M], [like], [total, total], compiler)

    rows = " ".join(f"r{i}" for i in range(num_rows))
    rule = f"{rows} m, {rows} m, m -> {rows} m, m, m"
    return with_rule(layer_norm_gradients, rule, reduction=rows.split(), need_replication=["m"])


_layer_norm.defvjp(_keep, _gradients)


@functools.cache
def _forward(epsilon: float) -> RowKernel:
    def body(rows: Sequence[jax.Array], vectors: Sequence[jax.Array], along: Along) -> Any:
        (x,), (scale, bias) = rows, vectors
        centred = x - along.mean(x)
        rate = jax.lax.rsqrt(along.mean(centred * centred) + epsilon)
        return [centred * rate * scale + bias], []

    return RowKernel(name="layer_norm", body=body, flops_per_element=7)


@functools.cache
def _backward(epsilon: float) -> RowKernel:
    def body(rows: Sequence[jax.Array], vectors: Sequence[jax.Array], along: Along) -> Any:
        (x, ct), (scale,) = rows, vectors
        centred = x - along.mean(x)
        rate = jax.lax.rsqrt(along.mean(centred * centred) + epsilon)
        of_norm, norm = ct * scale, centred * rate
        mean, slope = along.mean(of_norm), along.mean(of_norm * norm)
        return [rate * (of_norm - mean - norm * slope)], [ct * norm, ct]

    return RowKernel(name="layer_norm_gradients", body=body, flops_per_element=16)
