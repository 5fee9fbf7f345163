"""The padding of annotated dims that their axes do not divide, and the warning that states its cost."""

from __future__ import annotations

import math
from typing import Any

import jax

from ..errors import warn
from ..spec import Spec, indivisible, local_shape


def warn_padding(spec: Spec, x: Any, sizes: dict[str, int], asked: str) -> None:
    """Warns if a dim is padded, at the line of the call of `annotate`."""
    lines = indivisible(spec, tuple(jax.numpy.shape(x)), sizes)
    if lines:
        warn(f"{asked}: {'; '.join(lines)}. XLA pads it: {padding_bytes(spec, x, sizes)} bytes more over its shards.")


def padding_bytes(spec: Spec, x: Any, sizes: dict[str, int]) -> int:
    """Bytes of padding over all shards of one copy of `x`, an array or abstract array."""
    padded = spec.num_shards(sizes) * math.prod(local_shape(spec.axes, x.shape, sizes))
    return (padded - math.prod(x.shape)) * x.dtype.itemsize
