"""Bias, GELU (Hendrycks and Gimpel, arXiv:1606.08415) and dropout in one pass, as in DeepSpeed's transformer kernel.

The derivative takes the input, not the activation, and draws the dropout mask again from the key.

Shape suffixes: F features.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ShardingError
from . import dropout_mask, row_kernel
from .dropout_mask import Place
from .implementation import ONE_PASS, XLA, Backend, Candidate, backend, choose
from .row_kernel import Along, RowKernel
from .saved_names import saved
from .with_rule import with_rule

IMPLEMENTATIONS = (
    Candidate(
        name="mosaic_tpu", platforms=frozenset({"tpu"}), obstacle=lambda *xs: obstacle("mosaic_tpu", *xs), why=ONE_PASS
    ),
    Candidate(
        name="mosaic_gpu", platforms=frozenset({"gpu"}), obstacle=lambda *xs: obstacle("mosaic_gpu", *xs), why=ONE_PASS
    ),
)

GELU, APPROXIMATE_GELU, IDENTITY = "gelu", "approximate gelu", "identity"


def bias_gelu_dropout(
    x: jax.Array,
    bias_F: jax.Array | None = None,
    key: jax.Array | None = None,
    *,
    rate: float = 0.0,
    approximate: bool = True,
    implementation: str = "auto",
) -> jax.Array:
    """`dropout(gelu(x + bias))`, in float32.

    The mask is that of `jax.random.bernoulli(key, 1 - rate, x.shape)`, however the array is sharded.

    Args:
        x: [..., F], of a floating-point dtype.
        bias_F: [F].
        key: one key of threefry2x32; without it, nothing is dropped.
        rate: the fraction of elements that become 0; others are divided by `1 - rate`.
        approximate: whether GELU is that of tanh, as by default in `jax.nn.gelu`, not of erf.
        implementation: `"mosaic_tpu"`, `"mosaic_gpu"`, `"xla"`, or `"auto"`: the kernel of the current mesh's platform.

    Returns:
        [..., F], in the dtype of `x`.

    Raises:
        ShardingError: a bias or rate that doesn't fit; the implementation is unknown or can't take these arrays.

    Example:
        >>> import jax.numpy as jnp
        >>> from sharding import kernels
        >>> kernels.bias_gelu_dropout(jnp.zeros((1, 2)), jnp.array([0.0, 100.0]))
        Array([[  0., 100.]], dtype=float32)
    """
    activation = APPROXIMATE_GELU if approximate else GELU
    return _chosen("bias_gelu_dropout", x, bias_F, key, rate, activation, implementation)


def dropout(x: jax.Array, key: jax.Array | None, *, rate: float, implementation: str = "auto") -> jax.Array:
    """`x` with a fraction of its elements zeroed and others divided by `1 - rate`; its derivative keeps the key only.

    Args:
        x: [..., F], of a floating-point dtype.
        key: as of `bias_gelu_dropout`.
        rate: also.
        implementation: also.

    Raises:
        ShardingError: a rate that doesn't fit; the implementation is unknown or can't take these arrays.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from sharding import kernels
        >>> kernels.dropout(jnp.ones(8), jax.random.key(0), rate=0.5)
        Array([0., 0., 2., 2., 0., 2., 2., 0.], dtype=float32)
    """
    if key is None or not rate:
        return x
    return _chosen("dropout", x, None, key, rate, IDENTITY, implementation)


def reference(
    x: jax.Array,
    bias_F: jax.Array | None = None,
    key: jax.Array | None = None,
    rate: float = 0.0,
    activation: str = APPROXIMATE_GELU,
) -> jax.Array:
    """The same in plain JAX."""
    wide = x.astype(jnp.float32)
    if bias_F is not None:
        wide = wide + bias_F.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + bias_F.shape)
    if activation != IDENTITY:
        wide = jax.nn.gelu(wide, approximate=activation == APPROXIMATE_GELU)
    if key is not None and rate:
        wide = jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), wide / (1 - rate), 0)
    return wide.astype(x.dtype)


def obstacle(implementation: str, x: Any, key: Any) -> str:
    """Why a kernel can't run, or an empty text."""
    missing = row_kernel.obstacle(implementation, [x], is_elementwise=True)
    return missing or (dropout_mask.obstacle(x, key) if key is not None else "")


def _chosen(
    kernel: str,
    x: jax.Array,
    bias_F: jax.Array | None,
    key: jax.Array | None,
    rate: float,
    activation: str,
    implementation: str,
) -> jax.Array:
    if bias_F is not None and bias_F.shape != x.shape[-1:]:
        found = f"x {x.dtype}{list(x.shape)}, bias {bias_F.dtype}{list(bias_F.shape)}"
        raise ShardingError(f"kernels.{kernel}(x, bias)", found=found, required=f"bias {list(x.shape[-1:])}")
    if not 0 <= rate < 1:
        raise ShardingError(f"kernels.{kernel}(..., rate={rate})", required="at least 0 and less than 1")
    key = key if rate else None
    chosen = choose(kernel, IMPLEMENTATIONS, implementation, x, key)
    if chosen == XLA and activation == IDENTITY:
        return saved(reference(x, bias_F, key, rate, activation), "dropout_output")
    if chosen == XLA:
        return saved(reference(saved(x, "gelu_input"), bias_F, key, rate, activation), "gelu_output")
    place = None if key is None else dropout_mask.place(x.shape, key)
    return fused(x, bias_F, place, rate, activation, chosen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def fused(
    x: jax.Array, bias_F: jax.Array | None, place: Place | None, rate: float, activation: str, implementation: str
) -> jax.Array:
    """The kernel, with an activation."""
    rows, vectors = _operands(bias_F, place)
    run = _on_shards(len(rows), len(vectors), rate, activation, bias_F is not None, backend(implementation))
    return run(x, *rows, *vectors)


@functools.cache
def _on_shards(
    num_rows: int, num_vectors: int, rate: float, activation: str, has_bias: bool, compiler: Backend
) -> Callable[..., Any]:
    kernel = _forward(rate, activation, has_bias, num_rows)

    def bias_gelu_dropout(x: jax.Array, *others: jax.Array) -> jax.Array:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return kernel([x, *others[:num_rows]], others[num_rows:], [like], [], compiler)[0]

    rule = f"{', '.join(['... f', *['...'] * num_rows, *_vector_dims(num_vectors)])} -> ... f"
    return with_rule(bias_gelu_dropout, rule, need_replication=_words(num_rows))


def _keep(
    x: jax.Array, bias_F: jax.Array | None, place: Place | None, rate: float, activation: str, implementation: str
) -> Any:
    if activation == IDENTITY:
        y = fused(x, bias_F, place, rate, activation, implementation)
        return saved(y, "dropout_output"), (None, bias_F, place)
    x = saved(x, "gelu_input")
    return saved(fused(x, bias_F, place, rate, activation, implementation), "gelu_output"), (x, bias_F, place)


def _gradients(rate: float, activation: str, implementation: str, kept: Any, ct: jax.Array) -> Any:
    x, bias_F, place = kept
    if activation == IDENTITY:
        return fused(ct, None, place, rate, IDENTITY, implementation), None, None
    rows, vectors = _operands(bias_F, place)
    static = (len(rows), len(vectors), rate, activation, bias_F is not None, backend(implementation))
    of_x, *of_bias = _gradients_on_shards(x.ndim - 1, *static)(x, ct, *rows, *vectors)
    return of_x, None if bias_F is None else of_bias[0].astype(bias_F.dtype), None


@functools.cache
def _gradients_on_shards(
    num_dims: int, num_rows: int, num_vectors: int, rate: float, activation: str, has_bias: bool, compiler: Backend
) -> Callable[..., Any]:
    kernel = _backward(rate, activation, has_bias, num_rows)

    def bias_gelu_dropout_gradients(x: jax.Array, ct: jax.Array, *others: jax.Array) -> list[jax.Array]:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        sums = [jax.ShapeDtypeStruct((x.shape[-1],), jnp.float32)] if has_bias else []
        return kernel([x, ct, *others[:num_rows]], others[num_rows:], [like], sums, compiler)

    lead = " ".join(f"r{i}" for i in range(num_dims))
    operands = [f"{lead} f", f"{lead} f", *[lead] * num_rows, *_vector_dims(num_vectors)]
    rule = f"{', '.join(operands)} -> {lead} f{', f' if has_bias else ''}"
    reduction = lead.split() if has_bias else []
    return with_rule(bias_gelu_dropout_gradients, rule, reduction=reduction, need_replication=_words(num_rows))


fused.defvjp(_keep, _gradients)


def _operands(bias_F: jax.Array | None, place: Place | None) -> tuple[list[jax.Array], list[jax.Array]]:
    """Numbers per row, and vectors, of a kernel."""
    rows, vectors = ([], []) if place is None else (list(place.starts), [place.columns_F, *place.words])
    return rows, vectors if bias_F is None else [bias_F, *vectors]


def _vector_dims(count: int) -> list[str]:
    return ["f"] * count if count < 3 else [*["f"] * (count - 2), "word", "word"]


def _words(num_rows: int) -> list[str]:
    return ["word"] if num_rows else []


def _scale(starts: Sequence[jax.Array], vectors: Sequence[jax.Array], rate: float) -> Any:
    """What dropout multiplies with."""
    if not starts:
        return 1.0
    columns, *words = vectors
    kept = dropout_mask.is_kept(Place(tuple(starts), columns, (words[0], words[1])), rate)
    return jnp.where(kept, 1 / (1 - rate), 0.0)


@functools.cache
def _forward(rate: float, activation: str, has_bias: bool, num_starts: int) -> RowKernel:
    def body(rows: Sequence[jax.Array], vectors: Sequence[jax.Array], along: Along) -> Any:
        del along
        x, *starts = rows
        if has_bias:
            x, vectors = x + vectors[0], vectors[1:]
        y = {IDENTITY: lambda x: x, GELU: _gelu, APPROXIMATE_GELU: _approximate_gelu}[activation](x)
        return [y * _scale(starts, vectors, rate)], []

    return RowKernel(
        name="dropout" if activation == IDENTITY else "bias_gelu_dropout",
        body=body,
        flops_per_element=(1 if activation == IDENTITY else 9) + (dropout_mask.FLOPS if num_starts else 0),
        transcendentals_per_element=int(activation != IDENTITY),
        is_elementwise=True,
    )


@functools.cache
def _backward(rate: float, activation: str, has_bias: bool, num_starts: int) -> RowKernel:
    slope = _gelu_slope if activation == GELU else _approximate_gelu_slope

    def body(rows: Sequence[jax.Array], vectors: Sequence[jax.Array], along: Along) -> Any:
        del along
        x, ct, *starts = rows
        if has_bias:
            x, vectors = x + vectors[0], vectors[1:]
        of_x = ct * _scale(starts, vectors, rate) * slope(x)
        return [of_x], [of_x] if has_bias else []

    return RowKernel(
        name="bias_gelu_dropout_gradients",
        body=body,
        flops_per_element=18 + (dropout_mask.FLOPS if num_starts else 0),
        transcendentals_per_element=1 if activation == APPROXIMATE_GELU else 2,
        is_elementwise=True,
    )


ROOT, CUBIC = math.sqrt(2 / math.pi), 0.044715


ERF = 0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429
"""Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: to 1.5e-7. Mosaic GPU has no erf of rows."""


def _gelu(x: jax.Array) -> jax.Array:
    return x * _normal(x, jnp.exp(-0.5 * x * x))


def _gelu_slope(x: jax.Array) -> jax.Array:
    density = jnp.exp(-0.5 * x * x)
    return _normal(x, density) + x * density * (ROOT / 2)


def _normal(x: jax.Array, density: jax.Array) -> jax.Array:
    """The normal distribution function, given exp(-x^2 / 2)."""
    t = 1 / (1 + 0.3275911 * math.sqrt(0.5) * jnp.abs(x))
    tail = 0.5 * density * t * functools.reduce(lambda found, c: found * t + c, reversed(ERF[:-1]), ERF[-1])
    return jnp.where(x < 0, tail, 1 - tail)


def _approximate_gelu(x: jax.Array) -> jax.Array:
    return x * _sigmoid(x)


def _approximate_gelu_slope(x: jax.Array) -> jax.Array:
    s = _sigmoid(x)
    return s + x * s * (1 - s) * (2 * ROOT) * (1 + 3 * CUBIC * x * x)


def _sigmoid(x: jax.Array) -> jax.Array:
    """(1 + tanh u) / 2 by an exponential, which takes half the instructions."""
    return 1 / (1 + jnp.exp(-2 * ROOT * (x + CUBIC * x * x * x)))
