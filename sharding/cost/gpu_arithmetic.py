"""Time of elementwise arithmetic by which XLA:GPU fuses kernels, in microseconds.

XLA counts the cycles of each op per element, measured on an H100, as if a unit did two each time (openxla/xla,
`service/gpu/model/hlo_op_profiles_data.h`, `gpu_performance_model_base.cc`). These are the compiler's figures, used to
predict what it stores; for step times see `op_time`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .gpu_latencies import BYTES_PER_US

OTHER_CYCLES = 3
"""Of an op that XLA has not measured."""
CYCLES: Mapping[str, Mapping[str, int]] = {
    "float32": {
        "add": 7, "sub": 7, "div": 19, "exp": 79, "expm1": 190, "log": 166, "log1p": 229, "sqrt": 75, "rsqrt": 75,
        "cbrt": 178, "tanh": 467, "sin": 958, "cos": 978, "pow": 510, "atan2": 431,
    },
    "float64": {
        "add": 15, "sub": 15, "mul": 15, "div": 526, "exp": 376, "expm1": 712, "log": 815, "log1p": 1259, "sqrt": 332,
        "rsqrt": 277, "cbrt": 586, "tanh": 431, "sin": 554, "cos": 558, "pow": 2205, "atan2": 930,
    },
    "float16": {
        "add": 7, "sub": 7, "mul": 7, "div": 43, "exp": 102, "expm1": 217, "log": 182, "log1p": 245, "sqrt": 95,
        "rsqrt": 95, "cbrt": 201, "tanh": 502, "sin": 993, "cos": 997, "pow": 526, "atan2": 451,
    },
    "complex64": {
        "add": 7, "sub": 7, "mul": 79, "div": 498, "exp": 641, "expm1": 2055, "log": 756, "log1p": 633, "sqrt": 4344,
        "rsqrt": 3148, "tanh": 2379, "sin": 2324, "cos": 2415, "pow": 5532, "atan2": 6462,
    },
    "int32": {"div": 297, "pow": 71},
    "uint32": {"div": 122, "pow": 71},
}  # fmt: skip
"""Dtype -> primitive -> cycles per element."""
EXPANSIONS: Mapping[str, tuple[str, ...]] = {
    "add_any": ("add",),
    "erf_inv": ("log1p", "sqrt", *["add", "mul", "select_n"] * 9),
    "exp2": ("exp", "mul"),
    "logistic": ("neg", "exp", "add", "div"),
    "square": ("mul",),
}
"""Primitive -> the ops that XLA computes it by."""
CORES, UNITS = 132, 128
"""Of an H100, and the arithmetic units of each."""
CYCLES_PER_US = 2 * 1980
"""Of each unit."""
BLOCK_BYTES_PER_US = 32 * 1980
"""What one block of threads reads or writes at most."""
LAUNCH_US = 1.0
"""Of a kernel."""
CACHES = ((CORES * 2**18, 20.0), (50 * 2**20, 2.5))
"""The bytes of each cache, and how much faster than from memory smaller arrays are read again from it."""
OVERLAP = 0.95
"""The share of the shorter one of arithmetic and memory accesses that the other hides."""


def cycles(primitive: str, dtype: Any) -> int:
    """The cycles of an elementwise op per element; 16-bit arithmetic beyond sums and products is in float32."""
    name = str(dtype)
    if primitive in EXPANSIONS:
        return sum(cycles(one, name) for one in EXPANSIONS[primitive])
    if name == "bfloat16" and primitive not in ("add", "sub", "mul"):
        name = "float32"
    return CYCLES.get(name, {}).get(primitive, OTHER_CYCLES)


def arithmetic_us(num_cycles: float, num_blocks: int) -> float:
    """The time of so many cycles in a kernel of so many blocks of threads."""
    return num_cycles / (CYCLES_PER_US * UNITS * min(num_blocks, CORES))


def read_us(num_bytes: float, array_bytes: float, num_blocks: int) -> float:
    """The time to read so many bytes of an array, of which those beyond its size are read again, from the cache if it
    fits."""
    most = BLOCK_BYTES_PER_US * num_blocks
    rate = BYTES_PER_US if most > BYTES_PER_US else most
    if num_bytes <= array_bytes:
        return num_bytes / rate
    speedup = next((speedup for size, speedup in CACHES if array_bytes < size), 1.0)
    return array_bytes / rate + (num_bytes - array_bytes) / min(BYTES_PER_US * speedup, most)


def kernel_us(arithmetic: float, memory: float) -> float:
    """The time of a kernel, by those of its arithmetic and of its memory accesses."""
    return arithmetic + memory - OVERLAP * min(arithmetic, memory)
