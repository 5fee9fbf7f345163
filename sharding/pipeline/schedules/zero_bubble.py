"""Zero-bubble schedules: split backwards, with the weight gradients deferred to fill bubbles."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

from ..schedule import Schedule
from ..task_table import Kind, Task, check_positive
from .device_order import one_forward_one_backward

Step = tuple[Kind, int]
"""(kind, stage): the stage's next microbatch in this kind of task."""


def zb_h1(*, stages: int, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with weight gradients in the cool-down; a third of its bubble at the same peak memory.

    Stage s defers s weight gradients, so that every device stashes min(stages, microbatches) activations. The bubble is
    (stages - 1)(F + I - W), with I and W the two parts of a backward, against (stages - 1)(F + I + W).

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (2401.10241), section 2.1.
    """
    check_positive("schedules.zb_h1", stages=stages, microbatches=microbatches)
    warmup = [stages - stage for stage in range(stages)]
    return _with_deferred_weights("zb_h1", microbatches, warmup, list(range(stages)))


def zb_h2(*, stages: int, microbatches: int) -> Schedule:
    """ZB-H2: a longer warm-up that also fills the initial bubble; no device idles between its first and last task.

    Needs 2 stages - 1 activations per device. Devices start and end a step at different times, which is free where the
    next step starts without a flush, with the optimizer step validated afterwards. The bubble within a device is
    (stages - 1)(F + I - 2 W).

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (2401.10241), sections 2.2 and 4.
    """
    check_positive("schedules.zb_h2", stages=stages, microbatches=microbatches)
    warmup = [2 * (stages - stage) - 1 for stage in range(stages)]
    return _with_deferred_weights("zb_h2", microbatches, warmup, [2 * stage for stage in range(stages)])


def zb_v(*, stages: int, microbatches: int) -> Schedule:
    """ZB-V: two chunks per device, down the devices and up again in a V; no bubble within a device at 1F1B's peak.

    Device d runs stages d and 2 stages - 1 - d of the schedule's 2 stages, so the first and the last chunk of the model
    share a device, where backwards start early. With equal forwards, backward-inputs and backward-weights, and at least
    2 stages - 1 microbatches, no device idles between its first and last task, and none stashes more than ``stages``
    activations.

    Args:
        stages: the pipeline-parallel size; the schedule has twice as many stages.
        microbatches: of a step.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism (2401.10241v2) and Pipeline Parallelism with Controllable Memory,
        NeurIPS 2024 (2405.15362): V-ZB.
    """
    check_positive("schedules.zb_v", stages=stages, microbatches=microbatches)
    count = max(microbatches, 2 * stages - 1)  # enough to fill the pipeline; _with_microbatches() drops the surplus

    def steps(device: int) -> list[Step]:
        to_last = stages - device - 1
        down, up = device, 2 * stages - 1 - device
        forward_down: Step = ("forward", down)
        forward_up: Step = ("forward", up)
        backward_down: Step = ("backward-input", down)
        backward_up: Step = ("backward-input", up)
        weight: Step = ("backward-weight", device)
        return [
            *[forward_down] * (2 * to_last + 1),
            *[forward_up, forward_down] * device,
            *[forward_up, backward_up, weight] * (to_last + 1),
            *[forward_down, backward_down, weight, forward_up, backward_up, weight] * (count - stages - to_last),
            *[backward_down, weight, forward_up, backward_up, weight] * to_last,
            *[backward_down, backward_up] * device,
            *[backward_down, weight] * (to_last + 1),
            *[weight] * (2 * device),
        ]

    return _v_shaped("zb_v", stages, microbatches, steps)


def dualpipe_v(*, stages: int, microbatches: int) -> Schedule:
    """DualPipeV: two chunks per device in a V, pairing forwards with backwards of the other chunk to overlap transfers.

    Backwards are split only in the cool-down, where weight gradients fill the bubbles. Every device stashes
    stages + 1/2 activations for at least 2 stages microbatches. Here the two tasks of a pair run one after the other;
    devices that overlap them gain from it.

    Args:
        stages: the pipeline-parallel size; the schedule has twice as many stages.
        microbatches: of a step.

    References:
        DeepSeek-AI, DeepSeek-V3 Technical Report (2412.19437), section 3.2.1: DualPipe, here halved to one direction
        and one copy of the model, as in DeepSeek's later DualPipeV.
    """
    check_positive("schedules.dualpipe_v", stages=stages, microbatches=microbatches)
    count = max(microbatches, 2 * stages)  # enough to fill the pipeline; _with_microbatches() drops the surplus

    def steps(device: int) -> list[Step]:
        to_last = stages - device - 1
        down, up = device, 2 * stages - 1 - device
        forward_down: Step = ("forward", down)
        forward_up: Step = ("forward", up)
        backward_down: Step = ("backward", down)
        backward_up: Step = ("backward", up)
        weight: Step = ("backward-weight", device)
        draining = [backward_up, backward_down] * (device + 1)
        split: list[Step] = [("backward-input", stage) for _, stage in draining[device + 1 :]]
        return [
            *[forward_down] * (2 * to_last),
            *[forward_down, forward_up] * (device + 1),
            *[("backward-input", up), weight, forward_up] * to_last,
            *[forward_down, backward_up, forward_up, backward_down] * (count - stages - to_last),
            *[backward_up, forward_up, backward_down] * to_last,
            *draining[: device + 1],
            *split,
            *[weight, ("backward-input", down)] * to_last,
            *[weight] * (device + 1),
        ]

    return _v_shaped("dualpipe_v", stages, microbatches, steps)


def _with_deferred_weights(name: str, microbatches: int, warmup: list[int], delays: list[int]) -> Schedule:
    """A warm-up of `warmup` forwards per stage, with `delays` deferred weight gradients."""
    inputs = one_forward_one_backward(warmup, microbatches, backward="backward-input")
    orders = [tuple(_with_weight_tasks(order, delay)) for order, delay in zip(inputs, delays, strict=True)]
    return Schedule(name=name, orders=orders, stages=len(warmup), microbatches=microbatches)


def _v_shaped(name: str, stages: int, microbatches: int, steps: Callable[[int], list[Step]]) -> Schedule:
    """A schedule of two stages per device from each device's steps."""
    orders = [tuple(_with_microbatches(steps(device), microbatches)) for device in range(stages)]
    return Schedule(name=name, orders=orders, stages=2 * stages, microbatches=microbatches, chunks=2)


def _with_weight_tasks(order: Iterable[Task], delay: int) -> Iterator[Task]:
    """Inserts the oldest pending backward-weight when more than ``delay`` are pending; the rest run at the end."""
    waiting: deque[Task] = deque()
    for task in order:
        yield task
        if task.kind == "backward-input":
            waiting.append(task._replace(kind="backward-weight"))
            if len(waiting) > delay:
                yield waiting.popleft()
    yield from waiting


def _with_microbatches(steps: Iterable[Step], microbatches: int) -> Iterator[Task]:
    """The tasks of steps, without those past the last microbatch.

    A stage takes its microbatches in order, forward and backward; a backward-weight belongs to the oldest
    backward-input that lacks one.
    """
    forwards: Counter[int] = Counter()
    backwards: Counter[int] = Counter()
    waiting: deque[Task] = deque()
    for kind, stage in steps:
        if kind == "backward-weight":
            task = waiting.popleft()._replace(kind=kind)
        else:
            count = forwards if kind == "forward" else backwards
            task = Task(kind, stage, count[stage])
            count[stage] += 1
        if kind == "backward-input":
            waiting.append(task)
        if task.microbatch < microbatches:
            yield task
