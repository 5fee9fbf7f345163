"""Pipeline parallelism: schedules to validate, simulate, plot and execute, and planners of stages.

In: stages or an NNX model, a schedule, a mesh with a pipeline axis. Out: loss and gradients, or trained parameters.

Example:
    >>> from sharding import pipeline
    >>> s = pipeline.schedules.one_f_one_b(stages=3, microbatches=4)
    >>> print(s)
    device 0:  F0  F1  F2  B0  F3  B1  B2  B3
    device 1:  F0  F1  B0  F2  B1  F3  B2  B3
    device 2:  F0  B0  F1  B1  F2  B2  F3  B3
    >>> s.check()
    >>> t = s.simulate(forward=1.0, backward=2.0)
    >>> t.makespan, t.peak_activations
    (18.0, (3.0, 2.0, 1.0))
    >>> pipeline.schedules.zb_v(stages=3, microbatches=4).simulate(forward=1.0, backward=2.0).makespan
    13.0
    >>> pipeline.cut([1, 1, 1, 1, 2, 2], stages=4).sizes
    (2, 2, 1, 1)
    >>> from jax import numpy as jnp
    >>> zb_v = pipeline.schedules.zb_v(stages=2, microbatches=4)
    >>> pipeline.place(jnp.arange(zb_v.stages), zb_v).stages.tolist()
    [0, 3, 1, 2]
    >>> pipeline.token_slices(tokens=8, stages=2, duration=lambda length, before: 1 + length * (1 + 0.1 * before))
    TokenSlices(lengths=(5, 3), makespan=17.5)
    >>> def duration(size, length, before):
    ...     return 1 + size * length
    >>> pipeline.joint_slices(batch=2, tokens=8, stages=2, duration=duration).microbatches
    ((1, (4, 4)), (1, (4, 4)))
    >>> [(part.shape, start.tolist()) for part, start in pipeline.sliced(jnp.zeros((2, 3, 8), int), (5, 3))]
    [((2, 3, 5), [0, 0]), ((2, 3, 3), [5, 5])]
"""

from ..display.chart import Chart
from . import cutting, schedules
from .asynchronous_training import train_async
from .cutting import Cut, cut
from .gradient import Executor, ValueAndGrad, place, value_and_grad
from .placed_stages import PlacedStages
from .schedule import Schedule
from .simulation import Duration, Simulation
from .split_model import Split, split
from .task_table import KINDS, Kind, Task
from .token_slicing import JointSlices, TokenSlices, joint_slices, sliced, token_slices
from .wave_training import train_waves
from .waves import Push, Waves, WaveSimulation

__all__ = [
    "KINDS",
    "Chart",
    "Cut",
    "Duration",
    "Executor",
    "JointSlices",
    "Kind",
    "PlacedStages",
    "Push",
    "Schedule",
    "Simulation",
    "Split",
    "Task",
    "TokenSlices",
    "ValueAndGrad",
    "WaveSimulation",
    "Waves",
    "cut",
    "cutting",
    "joint_slices",
    "place",
    "schedules",
    "sliced",
    "split",
    "token_slices",
    "train_async",
    "train_waves",
    "value_and_grad",
]
