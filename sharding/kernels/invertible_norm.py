"""Norms that keep their output instead of their input: the input of the next matmul, which is kept anyway.

As DeepSpeed's `normalize_invertible` (after Rota Bulo et al., In-Place Activated BatchNorm, arXiv:1712.02616, section
3): the normalised rows are (y - bias) / scale, and with 1 / standard deviation of each row, a number per row, they give
all gradients. Where y is rounded to 16 bits, so are they. Layer norms have a bias, RMS norms don't.

Shape suffixes: M features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ShardingError
from .implementation import XLA, Backend, backend
from .row_kernel import Along, RowKernel
from .saved_names import saved
from .with_rule import with_rule


def keeps_output(kernel: str, keep: str) -> bool:
    """Whether a norm keeps its output.

    Raises:
        ShardingError: it keeps neither input nor output.
    """
    if keep not in ("input", "output"):
        raise ShardingError(f"kernels.{kernel}(..., keep={keep!r})", required="'input' or 'output'")
    return keep == "output"


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def invertible_norm(
    x: jax.Array, scale_M: jax.Array, bias_M: jax.Array | None, epsilon: float, implementation: str
) -> jax.Array:
    """The layer norm, or RMS norm without bias, of x [..., M]."""
    return _with_rate(x, scale_M, bias_M, epsilon, implementation)[0]


def _with_rate(
    x: jax.Array, scale_M: jax.Array, bias_M: jax.Array | None, epsilon: float, implementation: str
) -> tuple[jax.Array, jax.Array]:
    """The norm [..., M] and 1 / standard deviation of each row [...], in float32."""
    vectors = [scale_M] if bias_M is None else [scale_M, bias_M]
    if implementation == XLA:
        rate = jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)
        found, _ = _forward(epsilon, bias_M is not None).in_plain_jax([x], vectors, [x, rate], [])
    else:
        found = _on_shards(epsilon, bias_M is not None, backend(implementation))(x, *vectors)
    return found[0], found[1]


@functools.cache
def _on_shards(epsilon: float, has_bias: bool, compiler: Backend) -> Callable[..., Any]:
    def norm(x: jax.Array, *vectors: jax.Array) -> list[jax.Array]:
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)]
        return _forward(epsilon, has_bias)([x], vectors, results, [], compiler)

    operands = "... m, m, m" if has_bias else "... m, m"
    return with_rule(norm, f"{operands} -> ... m, ...", need_replication=["m"])


def _keep(x: jax.Array, scale_M: jax.Array, bias_M: jax.Array | None, epsilon: float, implementation: str) -> Any:
    y, rate = _with_rate(x, scale_M, bias_M, epsilon, implementation)
    y = saved(y, "norm_output")
    return y, (y, saved(rate, "norm_rate"), scale_M, bias_M)


def _gradients(epsilon: float, implementation: str, kept: Any, ct: jax.Array) -> tuple[jax.Array | None, ...]:
    del epsilon
    y, rate, scale_M, bias_M = kept
    vectors = [scale_M] if bias_M is None else [scale_M, bias_M]
    if implementation == XLA:
        (of_x,), of_vectors = _backward(bias_M is not None).in_plain_jax([y, ct, rate], vectors, [y], vectors)
    else:
        run = _gradients_on_shards(y.ndim - 1, bias_M is not None, backend(implementation))
        of_x, *of_vectors = run(y, ct, rate, *vectors)
    of_scale, *of_bias = (g.astype(one.dtype) for g, one in zip(of_vectors, vectors, strict=True))
    return of_x, of_scale, of_bias[0] if of_bias else None


@functools.cache
def _gradients_on_shards(num_rows: int, has_bias: bool, compiler: Backend) -> Callable[..., Any]:
    def norm_gradients(y: jax.Array, ct: jax.Array, rate: jax.Array, *vectors: jax.Array) -> list[jax.Array]:
        like = jax.ShapeDtypeStruct(y.shape, y.dtype)
        sums = [jax.ShapeDtypeStruct(one.shape, jnp.float32) for one in vectors]
        return _backward(has_bias)([y, ct, rate], vectors, [like], sums, compiler)

    rows, all_m = " ".join(f"r{i}" for i in range(num_rows)), ["m"] * (2 if has_bias else 1)
    rule = f"{', '.join([f'{rows} m', f'{rows} m', rows, *all_m])} -> {', '.join([f'{rows} m', *all_m])}"
    return with_rule(norm_gradients, rule, reduction=rows.split(), need_replication=["m"])


invertible_norm.defvjp(_keep, _gradients)


@functools.cache
def _forward(epsilon: float, has_bias: bool) -> RowKernel:
    def body(rows: Sequence[jax.Array], vectors: Sequence[jax.Array], along: Along) -> Any:
        (x,), (scale, *bias) = rows, vectors
        centred = x - along.mean(x) if has_bias else x
        rate = jax.lax.rsqrt(along.mean(centred * centred) + epsilon)
        y = centred * rate * scale
        return [y + bias[0] if has_bias else y, rate], []

    return RowKernel(name="invertible_norm", body=body, flops_per_element=7 if has_bias else 4)


@functools.cache
def _backward(has_bias: bool) -> RowKernel:
    def body(rows: Sequence[jax.Array], vectors: Sequence[jax.Array], along: Along) -> Any:
        (y, ct, rate), (scale, *bias) = rows, vectors
        norm = (y - bias[0] if has_bias else y) / scale
        of_norm = ct * scale
        slope = along.mean(of_norm * norm)
        centred = of_norm - along.mean(of_norm) if has_bias else of_norm
        return [rate * (centred - norm * slope)], [ct * norm, ct] if has_bias else [ct * norm]

    return RowKernel(name="invertible_norm_gradients", body=body, flops_per_element=13 if has_bias else 9)
