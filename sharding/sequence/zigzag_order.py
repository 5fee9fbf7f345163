"""Plain and zigzag order of a sequence over a ring, and the blocks of scores that each device computes.

A device has one chunk of the sequence (plain order) or two (zigzag). Under a causal mask, plain order gives the last
device n blocks and the first device one; in zigzag order device i has chunks i and 2n - 1 - i, and each device computes
2n + 1 blocks of a quarter of the size.

References: balancing causal rings by reordering is from Brandon et al., Striped Attention, 2023 (2311.09431), section
3; zigzag order keeps chunks contiguous.
"""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from ..errors import ShardingError

Order = Literal["plain", "zigzag"]

ORDERS: tuple[Order, ...] = ("plain", "zigzag")

MASKED, PARTIAL, UNMASKED = 0, 1, 2
"""Masking of a block of scores: fully, partially, not at all."""


def blocks(
    devices: int, *, causal: bool = True, order: Order = "plain", length: int | None = None, padded: int | None = None
) -> np.ndarray:
    """Masking of each device's blocks in each step of a ring: 0 fully masked, 1 partially, 2 not at all.

    In step t device i has the keys of device i - t. The kernels skip fully masked blocks.

    Args:
        devices: number of devices on the ring.
        causal: whether later positions are masked.
        order: order of the sequence over the devices.
        length: sequence length. Default: `padded`.
        padded: length padded to chunks of equal length. Default: two positions per chunk.

    Returns:
        [device, step, chunk of queries, chunk of keys].
    """
    firsts, padded = chunk_starts(devices, order, padded), padded or 2 * devices * (2 if order == "zigzag" else 1)
    size, end = padded // firsts.size, padded if length is None else length
    source = (np.arange(devices)[:, None] - np.arange(devices)) % devices
    q_start, k_start = firsts[:, None, :, None], firsts[source][:, :, None, :]
    is_masked = (k_start >= end) | (q_start >= end) | (causal & (k_start > q_start + size - 1))
    is_unmasked = (k_start + size <= end) & ((not causal) | (k_start + size - 1 <= q_start))
    return np.where(is_masked, MASKED, np.where(is_unmasked, UNMASKED, PARTIAL))


def chunk_starts(devices: int, order: Order, padded: int | None = None) -> np.ndarray:
    """The first position of each chunk of each device, [device, chunk]."""
    num = devices * (2 if order == "zigzag" else 1)
    size = 2 if padded is None else padded // num
    return _device_chunks(devices, order) * size


def positions(length: int, devices: int, order: Order) -> np.ndarray:
    """The original position of each entry of a sequence in this order."""
    chunks = _device_chunks(devices, order).reshape(-1)
    return np.arange(length).reshape(chunks.size, -1)[chunks].reshape(-1)


def zigzag(x: Any, devices: int, *, dim: int = 1) -> Any:
    """An array in zigzag order: sharded over `devices`, device i has chunks i and 2n - 1 - i of 2n.

    Apply it once to tokens, targets and positions; all layers of a causal model then use ``order="zigzag"``, since
    per-position layers do not depend on the order.

    Args:
        x: a numpy or JAX array.
        devices: size of the sequence axis of the mesh.
        dim: sequence dim, of a length that is a multiple of ``2 * devices``.

    Raises:
        ShardingError: an indivisible length.
    """
    return _reorder("sequence.zigzag", x, _device_chunks(devices, "zigzag").reshape(-1), dim)


def unzigzag(x: Any, devices: int, *, dim: int = 1) -> Any:
    """An array in zigzag order back in plain order; see ``zigzag``."""
    return _reorder("sequence.unzigzag", x, np.argsort(_device_chunks(devices, "zigzag").reshape(-1)), dim)


def _device_chunks(devices: int, order: Order) -> np.ndarray:
    """The chunks of each device, [device, chunk]."""
    first = np.arange(devices)
    return first[:, None] if order == "plain" else np.stack([first, 2 * devices - 1 - first], axis=1)


def _reorder(asked: str, x: Any, chunks: np.ndarray, dim: int) -> Any:
    length = x.shape[dim]
    if length % chunks.size:
        raise ShardingError(
            f"{asked}(x, {chunks.size // 2}, dim={dim})",
            found=f"shape {tuple(x.shape)}: {length} positions, {chunks.size} chunks",
            required=f"a multiple of {chunks.size} positions",
            fix=f"pad to {-(-length // chunks.size) * chunks.size}",
        )
    take = np.take if isinstance(x, np.ndarray) else jnp.take
    order = np.arange(length).reshape(chunks.size, -1)[chunks].reshape(-1)
    return take(x, order, axis=dim)
