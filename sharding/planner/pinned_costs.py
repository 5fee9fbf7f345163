"""Costs of the shardings of a node where an annotation decides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..graph import Annotation
from .problem import FORBIDDEN


def pinned_costs(costs: np.ndarray, shardings: np.ndarray, axes: Sequence[str], annotation: Annotation) -> np.ndarray:
    """Costs of shardings where those that contradict an annotation are forbidden, unless all do.

    Args:
        costs: float64 [shardings].
        shardings: int8 [shardings, axes].
        axes: of the mesh.
        annotation: of a value. One that divides no dim contradicts all.
    """
    names, keeps = np.array(axes), costs < FORBIDDEN
    for d, dim in enumerate(annotation.spec.dims):
        asked = np.isin(names, [axis if isinstance(axis, str) else axis[0] for axis in dim.axes])
        on = shardings == d
        keeps &= (on | ~asked).all(axis=1) if dim.open else (on == asked).all(axis=1)
    return np.where(keeps, costs, FORBIDDEN) if keeps.any() else costs
