"""Attention over sequences that an axis splits: in rings, or by changing what the axis splits.

Example:
    >>> from sharding import sequence
    >>> sequence.blocks(4, causal=True, order="zigzag").astype(bool).sum(axis=(1, 2, 3))  # of each device
    array([9, 9, 9, 9])
"""

from .attention import KINDS, Kind, attention
from .order import ORDERS, Order, blocks, positions, unzigzag, zigzag

__all__ = ["KINDS", "ORDERS", "Kind", "Order", "attention", "blocks", "positions", "unzigzag", "zigzag"]
