"""The published pipeline schedules: a function each, from numbers of stages and microbatches to a table.

Your own is another such function, or a table in a file (``Schedule.from_csv``).
"""

# isort: off
# One update at the end of a step: the gradient of the whole batch.
from .flushed import gpipe, one_f_one_b, eager_1f1b, dapple
from .interleaved import interleaved
from .bidirectional import chimera
from .zero_bubble import zb_h1, zb_h2, zb_v, dualpipe_v
from .sliced import terapipe

# Updates on the way: weights that miss some of them.
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
