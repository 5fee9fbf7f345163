"""Moving arguments to the shardings that a program takes: an array that is passed again is moved once."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding

from .. import compat
from ..display.units import bytes_text
from ..errors import warn

WARNED_BYTES = 2**20
"""A NumPy array from this size on that is transferred in one call after another is worth a warning."""


class PlacedArguments:
    """The last array that was moved for each leaf, and the array that it was moved to.

    A `jax.Array` never changes, so it is moved once, and its copy is kept as long as the array is alive. A NumPy array
    may have changed since the last call and is transferred each time, with a warning if it is large; not at all if
    the program does not read it.

    Args:
        function: its name, for the warning.
        names: of the leaves.
        donated: the leaves whose buffers a call consumes, which are not kept.
        unread: the leaves that the program does not read.
    """

    def __init__(self, function: str, names: Sequence[str], donated: Collection[int], unread: Collection[int] = ()):
        self._function, self._names, self._donated = function, names, donated
        self._unread = frozenset(unread)
        self._moved: dict[int, tuple[weakref.ref[Any], jax.Array]] = {}
        self._transferred: dict[int, weakref.ref[Any]] = {}
        """Leaf -> the NumPy array of the last call."""
        self._warned: set[int] = set()

    def move(self, leaves: list[Any], where: Sequence[int], shardings: Sequence[Any]) -> None:
        """Replaces the leaves at some positions by arrays with the given shardings, or Formats."""
        waiting = []
        for i in where:
            source, moved = self._moved.get(i, (None, None))
            if i in self._unread and not isinstance(leaves[i], jax.Array):
                continue  # `jax.jit` leaves it out
            if source is not None and moved is not None and source() is leaves[i] and not moved.is_deleted():
                leaves[i] = moved
            else:
                waiting.append(i)
        if not waiting:
            return
        moved = compat.device_put([leaves[i] for i in waiting], [shardings[i] for i in waiting])
        for i, x in zip(waiting, moved, strict=True):
            if isinstance(leaves[i], jax.Array) and i not in self._donated:
                self._moved[i] = weakref.ref(leaves[i], functools.partial(self._forget, i)), x
            elif isinstance(leaves[i], np.ndarray) and leaves[i].nbytes >= WARNED_BYTES:
                self._warn_of_repetition(i, leaves[i])
            leaves[i] = x

    def _forget(self, i: int, source: weakref.ref[Any]) -> None:
        found = self._moved.get(i)
        if found is not None and found[0] is source:
            self._moved.pop(i, None)  # another thread may have

    def _warn_of_repetition(self, i: int, x: np.ndarray) -> None:
        last = self._transferred.get(i)
        self._transferred[i] = weakref.ref(x)
        if i in self._warned or last is None or last() is not x:
            return
        self._warned.add(i)
        warn(
            f"{self._function}({self._names[i]}): the same NumPy array, {bytes_text(x.nbytes)}, is transferred to the "
            "devices on every call. Transfer it once: jax.device_put(x, sharding) with its spec in .in_shardings of "
            "the completion"
        )


def is_in_memory(x: Any, kind: str | None) -> bool:
    """Whether an argument is in a kind of memory, where None is the device's, or not placed yet."""
    if not (compat.is_committed(x) or is_abstract(x)) or x.sharding is None:
        return True
    return x.sharding.memory_kind in ((kind,) if kind else (None, "device"))


def needs_transfer(x: Any, required: Any) -> bool:
    """Whether an array or number does not have the required sharding, or the layout of a Format."""
    if required is None or is_abstract(x) or isinstance(x, compat.Tracer):
        return False
    if isinstance(required, Format):
        if not isinstance(required.layout, Layout):  # only the compiled program knows it: `jax.jit` transfers
            return isinstance(x, jax.Array) and needs_transfer(x, required.sharding)
        return needs_transfer(x, required.sharding) or _has_other_layout(x, required.layout)
    if not (compat.is_committed(x) and x.sharding.is_equivalent_to(required, x.ndim)):
        return getattr(x, "dtype", None) != jax.dtypes.float0  # which has no buffer
    # Explicit axes are part of an array's type.
    if not (isinstance(x.sharding, NamedSharding) and isinstance(required, NamedSharding)):
        return False
    return x.sharding.mesh.axis_types != required.mesh.axis_types


def _has_other_layout(x: Any, layout: Layout) -> bool:
    return compat.is_committed(x) and x.format.layout.major_to_minor != layout.major_to_minor


def is_abstract(x: Any) -> bool:
    """Whether an argument only has a shape, for completing and lowering."""
    return isinstance(x, jax.ShapeDtypeStruct)
