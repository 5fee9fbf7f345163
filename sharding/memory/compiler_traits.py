"""What each platform's compiler stores, where they differ: one record per platform."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..hardware import Platform
from ..rules.rule_table import TRANSCENDENTAL

Schedule = Literal["program order", "breadth first", "latency hiding"]
"""See `kernel_order`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakError:
    """Errors of predicted peaks over programs that others wrote (`tests/benchmarks/prediction.py --corpus --fit`)."""

    num_programs: int | None
    median: float
    """Half of the programs stay within it, relative to the compiled peak."""
    large: float
    """Nine of ten do."""
    low: float
    """Compiled over predicted peak: one program of twenty is below."""
    high: float
    """One of twenty is above."""


PEAK_ERRORS_FILE = Path(__file__).with_name("peak_errors.json")
PEAK_ERRORS: Mapping[Platform, PeakError] = {
    platform: PeakError(**error) for platform, error in json.loads(PEAK_ERRORS_FILE.read_text()).items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerTraits:
    """How one compiler's buffers differ from the program's arrays."""

    widens_16_bits: bool
    """Whether arithmetic, dots and collectives of 16-bit floats run in 32 bits."""
    transposes_operands: bool
    """Whether transposes are stored, and operands of dots and convolutions transposed to the order of a library; others
    choose layouts so that none is needed."""
    stores_around_reductions: bool
    """Whether a library runs large reductions with the elementwise ops around them, and stores what they share."""
    reduce_scatters: bool
    """Whether a reduce-scatter stores only its result; otherwise it is an all-reduce and a slice."""
    stored_once: frozenset[str]
    """Primitives that are stored rather than computed in each of several consumers."""
    adds_before_reducing: bool
    """Whether partial sums over the same devices are added before one reduction."""
    schedule: Schedule
    """The order of the kernels."""
    rounds_early: bool = False
    """Whether float32 values that are only read in bfloat16 are stored so."""
    counts_gaps_twice: bool = False
    """Whether `memory_analysis()` adds to the heap what exceeds the buffers live at once, of which stacks count only
    until a loop fills them: libtpu 0.0.51, by the buffer assignments that it dumps."""


ACCELERATOR = CompilerTraits(
    widens_16_bits=False,
    transposes_operands=False,
    stores_around_reductions=False,
    reduce_scatters=True,
    stored_once=frozenset({"gather", "threefry2x32", "threefry4x32"}),
    adds_before_reducing=True,
    schedule="program order",
)

TRAITS: Mapping[Platform, CompilerTraits] = {
    "cpu": CompilerTraits(
        widens_16_bits=True,
        transposes_operands=True,
        stores_around_reductions=True,
        reduce_scatters=False,
        stored_once=TRANSCENDENTAL,
        adds_before_reducing=False,
        schedule="breadth first",
    ),
    "tpu": replace(ACCELERATOR, rounds_early=True, counts_gaps_twice=True),
    "gpu": replace(ACCELERATOR, schedule="latency hiding"),
}
