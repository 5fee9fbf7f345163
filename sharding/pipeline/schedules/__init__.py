"""The published pipeline schedules, one function each. In: numbers of stages and microbatches. Out: a ``Schedule``.

Write your own as another such function, or as a CSV file (``Schedule.from_csv``).

Example:
    >>> from sharding.pipeline import schedules
    >>> print(schedules.one_f_one_b(stages=2, microbatches=3))
    device 0:  F0  F1  B0  F2  B1  B2
    device 1:  F0  B0  F1  B1  F2  B2
    >>> print(schedules.pipedream(stages=2, microbatches=3))
    device 0:  F0  F1  B0  F2  B1  B2
    device 1:  F0  B0  F1  B1  F2  B2
    >>> for make in (schedules.gpipe, schedules.eager_1f1b, schedules.dapple, schedules.zb_h1, schedules.dualpipe_v):
    ...     schedule = make(stages=4, microbatches=8)
    ...     times = schedule.simulate(forward=1.0, backward=2.0)
    ...     print(f"{schedule.name:11} bubble {times.bubble_fraction:.2f}, peak {max(times.peak_activations):g}")
    gpipe       bubble 0.27, peak 8
    eager_1f1b  bubble 0.27, peak 7
    dapple      bubble 0.27, peak 4
    zb_h1       bubble 0.11, peak 4
    dualpipe_v  bubble 0.06, peak 4.5
"""

# isort: off
# Synchronous: one update after a flush, with the gradient of the full batch.
from .synchronous import gpipe, one_f_one_b, eager_1f1b, dapple
from .interleaved import interleaved
from .bidirectional import chimera
from .zero_bubble import zb_h1, zb_h2, zb_v, dualpipe_v
from .terapipe_slices import terapipe

# Asynchronous: no flush, stale weights.
from .asynchronous import pipedream, pipedream_2bw, hetpipe

# isort: on

__all__ = [
    "chimera",
    "dapple",
    "dualpipe_v",
    "eager_1f1b",
    "gpipe",
    "hetpipe",
    "interleaved",
    "one_f_one_b",
    "pipedream",
    "pipedream_2bw",
    "terapipe",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
