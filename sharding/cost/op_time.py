"""Work of an op on one device, and its time by the roofline model."""

from __future__ import annotations

from dataclasses import dataclass

from ..hardware import Chip, Precision
from ..rules.rule_table import ELEMENTWISE, MOVES
from .bytes_accessed import READ, WRITTEN, Arrays, Params, all_operands, all_results
from .flops import FLOPS, MATMULS, ON_MATRIX_UNIT, TRANSCENDENTAL, per_element
from .kernel_work import KERNELS, Flops, kernel_flops

LISTED = ELEMENTWISE | MOVES | FLOPS.keys()
"""Primitives with an explicit count; any other counts 1 FLOP per element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """FLOPs and memory traffic of an op on one device."""

    flops: float
    read_bytes: float
    written_bytes: float
    matmul_dtype: str | None = None
    """The operands' dtype on the matrix unit; None on the vector unit."""
    precision: Precision = "default"

    @property
    def num_bytes(self) -> float:
        """Read and written."""
        return self.read_bytes + self.written_bytes


def work(primitive: str, operands: Arrays, results: Arrays, params: Params) -> Work:
    """The work of an op on one device.

    Args:
        primitive: its name, as in `jax.extend.core.Primitive`.
        operands: local shapes and dtypes.
        results: likewise.
        params: of the equation; sizes are taken from operands and results where possible.
    """
    flops = (
        kernel_flops(primitive, operands, params, _flops)
        if primitive in KERNELS
        else _flops(primitive, operands, results, params)
    )
    return Work(
        flops=flops.total,
        read_bytes=READ.get(primitive, all_operands)(operands, results, params),
        written_bytes=WRITTEN.get(primitive, all_results)(operands, results, params),
        matmul_dtype=flops.matmul_dtype,
        precision=_precision(params) if primitive in MATMULS else "default",
    )


def _flops(primitive: str, operands: Arrays, results: Arrays, params: Params) -> Flops:
    """FLOPs of an op without a body."""
    count = FLOPS.get(primitive, per_element(TRANSCENDENTAL.get(primitive, 1)))
    dtype = str(operands[0].dtype) if primitive in ON_MATRIX_UNIT else None
    return Flops(count(operands, results, params), dtype)


def op_seconds(done: Work, chip: Chip) -> float:
    """Seconds of an op on a device: the longer of compute and memory access, plus the chip's overhead per op.

    The roofline model (Williams, Waterman and Patterson, CACM 2009) at the rates that programs reach, where the chip's
    record has them or it is calibrated; else at peak rates, a lower bound.
    """
    if not done.flops and not done.num_bytes:
        return 0.0
    return max(_compute_seconds(done, chip), _memory_seconds(done, chip)) + chip.op_seconds


def is_compute_bound(done: Work, chip: Chip) -> bool:
    """Whether an op takes longer to compute than to read and write its arrays."""
    return _compute_seconds(done, chip) >= _memory_seconds(done, chip)


def _compute_seconds(done: Work, chip: Chip) -> float:
    if done.matmul_dtype is None:
        return done.flops / chip.rates.vector_flops_per_second
    return done.flops / (chip.matmul_share * chip.rates.matmul_flops_per_second(done.matmul_dtype, done.precision))


def _memory_seconds(done: Work, chip: Chip) -> float:
    return done.num_bytes / (chip.memory_share * chip.memory_bytes_per_second)


def _precision(params: Params) -> Precision:
    """The precision of a matmul: the higher of the two operands'."""
    text = str(params.get("precision")).upper()
    return "highest" if "HIGHEST" in text or "F32_F32_F32" in text else "high" if "HIGH" in text else "default"
