"""`row_major`: an array in row-major layout on CPUs; on other platforms any layout will do."""

from __future__ import annotations

from typing import Any

import jax.extend.core as jex
from jax.experimental import jet
from jax.experimental.layout import Layout, with_layout_constraint

from .. import compat
from ..compat import ad, batching, mlir

row_major_p = jex.Primitive("row_major_on_cpu")


def row_major(like: Any, operand: Any, result: Any) -> Any:
    """An equation that constrains an array to the row-major layout on CPUs."""
    return compat.new_eqn(like, [operand], [result], row_major_p, {})


def _batch(args: Any, dims: Any) -> Any:
    return row_major_p.bind(*args), *dims


def _constrained(x: Any) -> Any:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


row_major_p.def_impl(lambda x: x)
row_major_p.def_abstract_eval(lambda x: x)
jet.deflinear(row_major_p)
ad.deflinear2(row_major_p, lambda ct, _: [ct])  # the program of a nested function is differentiated
batching.primitive_batchers[row_major_p] = _batch
mlir.register_lowering(row_major_p, lambda _, x: [x])
mlir.register_lowering(row_major_p, mlir.lower_fun(_constrained, multiple_results=False), platform="cpu")
