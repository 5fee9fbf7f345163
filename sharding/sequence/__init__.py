"""Attention over sequences sharded over an axis: ring attention (plain or zigzag order) and Ulysses.

In: queries, keys and values [batch, length, heads, head_dim]. Out: attention, and the token order over devices.

Example:
    >>> from sharding import sequence
    >>> sequence.blocks(4, causal=True, order="zigzag").astype(bool).sum(axis=(1, 2, 3))  # per device
    array([9, 9, 9, 9])
    >>> from jax import numpy as jnp
    >>> sequence.positions(8, 2, "zigzag")
    array([0, 1, 6, 7, 2, 3, 4, 5])
    >>> x = sequence.zigzag(jnp.arange(8)[None], 2)
    >>> x, sequence.unzigzag(x, 2)
    (Array([[0, 1, 6, 7, 2, 3, 4, 5]], dtype=int32), Array([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=int32))
"""

from .attention import KINDS, Kind, attention
from .zigzag_order import ORDERS, Order, blocks, positions, unzigzag, zigzag

__all__ = ["KINDS", "ORDERS", "Kind", "Order", "attention", "blocks", "positions", "unzigzag", "zigzag"]
