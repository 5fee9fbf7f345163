"""Pipelines: a schedule is a table of who does what when, to be checked, timed and drawn before anything runs.

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
"""

from . import cutting, schedules
from .asynchronous import train_async
from .chart import Chart
from .cutting import Cut, cut
from .gradient import Executor, ValueAndGrad, place, value_and_grad
from .schedule import Schedule
from .simulation import Duration, Simulation
from .slicing import JointSlices, TokenSlices, joint_slices, sliced, token_slices
from .split import Split, split
from .table import KINDS, Kind, Task
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
