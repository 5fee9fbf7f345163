"""Stored errors of predicted peaks, by platform."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..hardware import Platform


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
