"""The mesh of an elastic run that goes on with fewer devices."""

import math

from .config.mesh_config import BATCH_AXES

Axes = dict[str, int]


def fewer_devices(axes: Axes, available: int) -> Axes:
    """The axes reduced to fewer devices: batch axes are halved first, then the others, the last one first.

    The program and its global batch stay the same.
    """
    axes = dict(axes)
    for axis in (*BATCH_AXES, *(axis for axis in reversed(axes) if axis not in BATCH_AXES)):
        while math.prod(size for size in axes.values() if size != -1) > available and axes.get(axis, 1) % 2 == 0:
            axes[axis] //= 2
    return axes
