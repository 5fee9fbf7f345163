"""Which part of a sequence each device has, and which blocks of scores that leaves it to compute.

A device has one chunk of the sequence (plain order) or two (zig-zag). Under a causal mask plain order gives the last
device n blocks and the first one; in zig-zag order, where device i has the chunks i and 2n - 1 - i, each has 2n + 1 of
a quarter of the size.

References: the balance of causal rings by another order is Brandon et al., Striped Attention, 2023 (2311.09431),
section 3; in zig-zag order the blocks stay whole.
"""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from ..errors import ShardingError

Order = Literal["plain", "zigzag"]

ORDERS: tuple[Order, ...] = ("plain", "zigzag")

MASKED, PARTLY, WHOLE = 0, 1, 2
"""What a block of scores is: all masked, partly, not at all."""


def blocks(
    devices: int, *, causal: bool = True, order: Order = "plain", length: int | None = None, padded: int | None = None
) -> np.ndarray:
    """The blocks of scores that each device meets in each step of a ring: 0 masked, 1 partly, 2 not.

    In step t device i has the keys of device i - t. The kernels skip what this says is masked.

    Args:
        devices: on the ring.
        causal: whether a position sees itself and those before it only, or all.
        order: of the sequence over the devices.
        length: of the sequence; default: `padded`.
        padded: the length with what is added at its end for chunks of one length. Default: two positions a chunk.

    Returns:
        [device, step, chunk of its queries, chunk of the keys].
    """
    firsts, padded = starts(devices, order, padded), padded or 2 * devices * (2 if order == "zigzag" else 1)
    size, end = padded // firsts.size, padded if length is None else length
    source = (np.arange(devices)[:, None] - np.arange(devices)) % devices
    q_start, k_start = firsts[:, None, :, None], firsts[source][:, :, None, :]
    is_masked = (k_start >= end) | (q_start >= end) | (causal & (k_start > q_start + size - 1))
    is_whole = (k_start + size <= end) & ((not causal) | (k_start + size - 1 <= q_start))
    return np.where(is_masked, MASKED, np.where(is_whole, WHOLE, PARTLY))


def starts(devices: int, order: Order, padded: int | None = None) -> np.ndarray:
    """The first position of each chunk of each device, [device, chunk]."""
    num = devices * (2 if order == "zigzag" else 1)
    size = 2 if padded is None else padded // num
    return _chunks(devices, order) * size


def positions(length: int, devices: int, order: Order) -> np.ndarray:
    """The position of each entry of a sequence in this order."""
    chunks = _chunks(devices, order).reshape(-1)
    return np.arange(length).reshape(chunks.size, -1)[chunks].reshape(-1)


def zigzag(x: Any, devices: int, *, dim: int = 1) -> Any:
    """An array in zig-zag order: split over so many devices, device i has the chunks i and 2n - 1 - i of 2n.

    Made once of tokens, targets and positions, it lets every layer of a causal model work with ``order="zigzag"``: what
    else a model does with each position does not mind the order.

    Args:
        x: an array, of numpy or JAX.
        devices: the length of the sequence's axis.
        dim: the sequence in it, a multiple of ``2 * devices`` long.

    Raises:
        ShardingError: another length.
    """
    return _reordered("sequence.zigzag", x, _chunks(devices, "zigzag").reshape(-1), dim)


def unzigzag(x: Any, devices: int, *, dim: int = 1) -> Any:
    """An array that is in zig-zag order, in plain order; see ``zigzag``."""
    return _reordered("sequence.unzigzag", x, np.argsort(_chunks(devices, "zigzag").reshape(-1)), dim)


def _chunks(devices: int, order: Order) -> np.ndarray:
    """The chunks of each device, [device, chunk]."""
    first = np.arange(devices)
    return first[:, None] if order == "plain" else np.stack([first, 2 * devices - 1 - first], axis=1)


def _reordered(asked: str, x: Any, chunks: np.ndarray, dim: int) -> Any:
    length = x.shape[dim]
    if length % chunks.size:
        raise ShardingError(
            f"{asked}(x, {chunks.size // 2}, dim={dim})",
            there=f"shape {tuple(x.shape)}: {length} positions, {chunks.size} chunks",
            must="chunks of one length",
            fix=f"pad to {-(-length // chunks.size) * chunks.size}",
        )
    take = np.take if isinstance(x, np.ndarray) else jnp.take
    order = np.arange(length).reshape(chunks.size, -1)[chunks].reshape(-1)
    return take(x, order, axis=dim)
