"""Rotary position embedding (Su et al., RoFormer, arXiv:2104.09864, section 3.4): pairs of features, rotated.

A pair turns by its frequency times the position. The derivative is the inverse rotation of the cotangent, so nothing of
the input is kept, only the cosines and sines of the positions, which all heads share.

The TPU compiler makes three passes of plain JAX, with float32 in between: in front of attention 42 MB of temporary
memory on a v5p, 25 MB with the kernel, for q and k of 4 x 2048 x 4 heads x 128. The GPU compiler fuses the rotation
with what slices q and k; the kernel saves it nothing and is there to be asked for.

Shape suffixes: B all dims in front, S positions, N heads, D features of a head, H half of the rotated features.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..errors import ShardingError
from ..mesh import platform
from . import rotary_gpu
from .implementation import XLA, Backend, Candidate, backend, choose, tpu_kernel, unsupported
from .with_rule import with_rule

BLOCK_BYTES = 2**20
"""Of a block of a TPU program, in float32; input, output and tables are buffered twice."""

ROWS = 16
"""Positions of a TPU block are a multiple of as many: a tile of 16-bit elements."""

IMPLEMENTATIONS = (
    Candidate(
        name="mosaic_tpu",
        platforms=frozenset({"tpu"}),
        obstacle=lambda x, *_, **__: obstacle(x),
        why="one pass over memory; the compiler makes three",
    ),
    Candidate(
        name="mosaic_gpu",
        platforms=frozenset(),
        obstacle=rotary_gpu.obstacle,
        why="one pass over memory; so is what the compiler fuses",
    ),
)


def rotary(
    x_BSND: jax.Array,
    positions: jax.Array | None = None,
    *,
    base: float = 10_000.0,
    features: int | None = None,
    frequencies_H: jax.Array | None = None,
    interleaved: bool = False,
    implementation: str = "auto",
) -> jax.Array:
    """Queries or keys whose pairs of features are rotated by their positions, in float32.

    Args:
        x_BSND: [..., S, N, D], of a floating-point dtype.
        positions: integers or floats, [S] or [..., S] with the leading dims of `x`; by default 0 to S - 1. They have no
            gradient.
        base: pair i of H turns by `base ** (-i / H)` per position.
        features: how many of a head's features are rotated, the first ones; by default all. Others pass.
        frequencies_H: [H], frequencies in place of those of `base`, as of scaled contexts.
        interleaved: pairs are neighbours, (2i, 2i + 1), as published; otherwise (i, i + H), as in Llama.
        implementation: `"mosaic_tpu"`, `"mosaic_gpu"`, `"xla"`, or `"auto"`: the kernel on TPUs, plain JAX elsewhere.

    Returns:
        [..., S, N, D], in the dtype of `x`.

    Raises:
        ShardingError: shapes or features that don't fit; the implementation is unknown or can't take these arrays.

    Example:
        >>> import jax.numpy as jnp
        >>> from sharding import kernels
        >>> x = jnp.array([1.0, 0.0]).reshape(1, 1, 2)
        >>> kernels.rotary(x, jnp.array([jnp.pi / 2])).round(3).ravel()
        Array([-0.,  1.], dtype=float32)
    """
    rotated = x_BSND.shape[-1] if features is None else features
    _check(x_BSND, positions, frequencies_H, rotated)
    half = rotated // 2
    if frequencies_H is None:
        frequencies_H = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if positions is None:
        positions = jnp.arange(x_BSND.shape[-3])
    angles_BSH = positions.astype(jnp.float32)[..., None] * frequencies_H.reshape((1,) * positions.ndim + (half,))
    cos_BSH, sin_BSH = (jax.lax.stop_gradient(f(angles_BSH)) for f in (jnp.cos, jnp.sin))
    chosen = choose("rotary", IMPLEMENTATIONS, implementation, x_BSND, half=half, is_interleaved=interleaved)
    if chosen == XLA:
        if platform() == "cpu":  # XLA:CPU would compute them again for each head and example
            cos_BSH, sin_BSH = jax.lax.optimization_barrier((cos_BSH, sin_BSH))
        return reference(x_BSND, cos_BSH, sin_BSH, interleaved)
    return _rotary(x_BSND, cos_BSH, sin_BSH, interleaved, chosen)


def reference(x_BSND: jax.Array, cos_BSH: jax.Array, sin_BSH: jax.Array, is_interleaved: bool = False) -> jax.Array:
    """The rotation in plain JAX, by cosines and sines [S, H] or [..., S, H]."""
    half = cos_BSH.shape[-1]
    missing = tuple(range(x_BSND.ndim - 1 - cos_BSH.ndim))
    cos, sin = (jnp.expand_dims(y, missing)[..., None, :] for y in (cos_BSH, sin_BSH))
    wide, rest = x_BSND[..., : 2 * half].astype(jnp.float32), x_BSND[..., 2 * half :]
    if is_interleaved:
        pairs = wide.reshape(*wide.shape[:-1], half, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(wide.shape)
    else:
        a, b = wide[..., :half], wide[..., half:]
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    turned = turned.astype(x_BSND.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def obstacle(x: Any) -> str:
    """Why the TPU kernel can't run, or an empty text."""
    if missing := unsupported("mosaic_tpu"):
        return missing
    return "" if x.dtype in (jnp.float32, jnp.bfloat16) else "float32 or bfloat16"


def _check(x: Any, positions: Any, frequencies: Any, features: int) -> None:
    found = f"x {x.dtype}{list(x.shape)}"
    if x.ndim < 3 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ShardingError("kernels.rotary(x)", found=found, required="x [..., S, N, D] of a floating-point dtype")
    if features % 2 or not 0 < features <= x.shape[-1]:
        required = f"an even number of features from 2 to {x.shape[-1]}"
        raise ShardingError(f"kernels.rotary(x, features={features})", found=found, required=required)
    if positions is not None and positions.shape not in (x.shape[-3:-2], x.shape[:-2]):
        found += f", positions {list(positions.shape)}"
        required = f"positions {list(x.shape[-3:-2])} or {list(x.shape[:-2])}"
        raise ShardingError("kernels.rotary(x, positions)", found=found, required=required)
    if frequencies is not None and frequencies.shape != (features // 2,):
        raise ShardingError(
            "kernels.rotary(x, frequencies_H=...)",
            found=f"frequencies {list(frequencies.shape)}",
            required=f"[{features // 2}], one for each pair of {features} features",
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _rotary(x: jax.Array, cos: jax.Array, sin: jax.Array, is_interleaved: bool, implementation: str) -> jax.Array:
    return _on_shards(x.ndim - 3, cos.ndim > 2, is_interleaved, backend(implementation))(x, cos, sin)


@functools.cache
def _on_shards(num_batch_dims: int, is_per_batch: bool, is_interleaved: bool, compiler: Backend) -> Callable[..., Any]:
    def rotary(x_BSND: jax.Array, cos_BSH: jax.Array, sin_BSH: jax.Array) -> jax.Array:
        lead, shared = x_BSND.shape[:-3], not is_per_batch
        on_tpu = functools.partial(_on_tpu, is_interleaved=is_interleaved)
        run = on_tpu if compiler.target == "tpu" else rotary_gpu.rotated
        x = x_BSND.reshape(math.prod(lead), *x_BSND.shape[-3:])
        cos_ZSH, sin_ZSH = (y[None] if shared else y.reshape(-1, *y.shape[-2:]) for y in (cos_BSH, sin_BSH))
        return run(x, cos_ZSH, sin_ZSH, interpret=compiler.interpret).reshape(x_BSND.shape) if x.size else x_BSND

    lead = " ".join(f"b{i}" for i in range(num_batch_dims))
    table = f"{lead} s h" if is_per_batch else "s h"
    return with_rule(rotary, f"{lead} s n d, {table}, {table} -> {lead} s n d", need_replication=["d", "h"])


def _keep(x: jax.Array, cos: jax.Array, sin: jax.Array, is_interleaved: bool, implementation: str) -> Any:
    return _rotary(x, cos, sin, is_interleaved, implementation), (cos, sin)


def _gradients(is_interleaved: bool, implementation: str, kept: Any, ct: jax.Array) -> Any:
    cos, sin = kept
    return _rotary(ct, cos, -sin, is_interleaved, implementation), None, None


_rotary.defvjp(_keep, _gradients)


def _on_tpu(x_BSND: jax.Array, cos_ZSH: jax.Array, sin_ZSH: jax.Array, *, is_interleaved: bool, interpret: Any) -> Any:
    """Heads in front of positions, as attention kernels take them; Z is B, or 1 for tables that all share."""
    batch, length, heads, features = x_BSND.shape
    half = cos_ZSH.shape[-1]
    shift = 1 if is_interleaved else half
    # Of all features: y = x cos + partner sin, where the partner of a pair's first element has a negative sine.
    if is_interleaved:
        cos_ZSD, sin_ZSD = (jnp.repeat(y, 2, axis=-1) for y in (cos_ZSH, sin_ZSH))
        sin_ZSD = sin_ZSD * jnp.where(jnp.arange(2 * half) % 2, 1.0, -1.0).reshape(1, 1, -1)
    else:
        cos_ZSD, sin_ZSD = jnp.concatenate([cos_ZSH, cos_ZSH], -1), jnp.concatenate([-sin_ZSH, sin_ZSH], -1)
    rest = ((0, 0), (0, 0), (0, features - 2 * half))
    cos_ZSD, sin_ZSD = jnp.pad(cos_ZSD, rest, constant_values=1.0), jnp.pad(sin_ZSD, rest)
    block = min(pl.cdiv(length, ROWS) * ROWS, max(ROWS, BLOCK_BYTES // (4 * features) // ROWS * ROWS))
    is_shared = len(cos_ZSD) == 1

    def kernel(x_ref: Any, cos_ref: Any, sin_ref: Any, out_ref: Any) -> None:
        x = x_ref[...].astype(jnp.float32)
        after = jnp.concatenate([x[:, shift:], x[:, :shift]], axis=1)
        before = jnp.concatenate([x[:, features - shift :], x[:, : features - shift]], axis=1)
        lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        partner = jnp.where(lane % (2 * shift) < shift, after, before)
        out_ref[...] = (x * cos_ref[...] + partner * sin_ref[...]).astype(out_ref.dtype)

    of_x = pl.BlockSpec((None, None, block, features), lambda s, b, n: (b, n, s, 0))
    of_table = pl.BlockSpec((None, block, features), lambda s, b, n: (0 if is_shared else b, s, 0))
    x_BNSD = jnp.swapaxes(x_BSND, 1, 2)
    y_BNSD = tpu_kernel(
        kernel,
        grid=(pl.cdiv(length, block), batch, heads),
        in_specs=[of_x, of_table, of_table],
        out_specs=of_x,
        out_shape=jax.ShapeDtypeStruct(x_BNSD.shape, x_BNSD.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        cost_estimate=pl.CostEstimate(
            flops=3 * x_BNSD.size,
            transcendentals=0,
            bytes_accessed=2 * x_BNSD.size * x_BNSD.dtype.itemsize + 8 * cos_ZSD.size,
        ),
        interpret=interpret,
        name="rotary",
    )(x_BNSD, cos_ZSD, sin_ZSD)
    return jnp.swapaxes(y_BNSD, 1, 2)
