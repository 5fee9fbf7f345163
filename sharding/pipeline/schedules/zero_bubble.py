"""Backwards in two parts, of which the one for the weights waits until a device would be idle."""

from __future__ import annotations

from collections.abc import Callable

from ..schedule import Schedule
from ..table import at_least_one
from .order import Step, numbered, one_forward_one_backward, with_weights


def zb_h1(*, stages: int, microbatches: int) -> Schedule:
    """1F1B whose weight parts fill the end: a third of its idle time at its peak.

    Stage s lets s weight parts wait, so that every device holds min(stages, microbatches) activations. Idle time is
    (stages - 1)(F + I - W), of a forward and the two parts of a backward, against (stages - 1)(F + I + W).

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (2401.10241), section 2.1.
    """
    at_least_one("schedules.zb_h1", stages=stages, microbatches=microbatches)
    ahead = [stages - stage for stage in range(stages)]
    return _handcrafted("zb_h1", microbatches, ahead, list(range(stages)))


def zb_h2(*, stages: int, microbatches: int) -> Schedule:
    """As many more microbatches ahead as fill the beginning too: no device is idle between its first and last task.

    Needs 2 stages - 1 activations per device. Devices begin and end a step one after the other; that costs nothing
    where the next step begins without a flush, with the optimizer's step validated afterwards. Idle time within a
    device is (stages - 1)(F + I - 2 W).

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (2401.10241), sections 2.2 and 4.
    """
    at_least_one("schedules.zb_h2", stages=stages, microbatches=microbatches)
    ahead = [2 * (stages - stage) - 1 for stage in range(stages)]
    return _handcrafted("zb_h2", microbatches, ahead, [2 * stage for stage in range(stages)])


def zb_v(*, stages: int, microbatches: int) -> Schedule:
    """Two chunks per device, down the devices and up again in a V: no idle time within a device at 1F1B's peak.

    Device d has stages d and 2 stages - 1 - d of the schedule's 2 stages, so the last chunk of the model is where the
    first is, and backwards begin early there. With equal forwards, backward-inputs and backward-weights no device is
    idle between its first and last task from 2 stages - 1 microbatches on, and none holds more than ``stages``
    activations.

    Args:
        stages: how many devices the model is cut for.
        microbatches: of a step.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism (2401.10241v2) and Pipeline Parallelism with Controllable Memory,
        NeurIPS 2024 (2405.15362): V-ZB.
    """
    at_least_one("schedules.zb_v", stages=stages, microbatches=microbatches)
    count = max(microbatches, 2 * stages - 1)  # so many fill it; numbered() leaves out those that there aren't

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

    return _in_a_v("zb_v", stages, microbatches, steps)


def dualpipe_v(*, stages: int, microbatches: int) -> Schedule:
    """Two chunks per device in a V, each forward beside a backward of the other chunk, whose exchanges it can hide.

    Backwards are whole but for those at the end, whose weight parts fill the gaps. Every device holds stages + 1/2
    activations from 2 stages microbatches on. Pairs run one after the other here; devices that overlap them gain from
    it.

    Args:
        stages: how many devices the model is cut for.
        microbatches: of a step.

    References:
        DeepSeek-AI, DeepSeek-V3 Technical Report (2412.19437), section 3.2.1: DualPipe, here cut in half to one
        direction and one copy of the model, as in DeepSeek's later DualPipeV.
    """
    at_least_one("schedules.dualpipe_v", stages=stages, microbatches=microbatches)
    count = max(microbatches, 2 * stages)  # so many fill it; numbered() leaves out those that there aren't

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

    return _in_a_v("dualpipe_v", stages, microbatches, steps)


def _handcrafted(name: str, microbatches: int, ahead: list[int], delays: list[int]) -> Schedule:
    """Per stage so many microbatches go ahead, and so many weight parts wait."""
    inputs = one_forward_one_backward(ahead, microbatches, backward="backward-input")
    orders = [tuple(with_weights(order, delay)) for order, delay in zip(inputs, delays, strict=True)]
    return Schedule(name=name, orders=orders, stages=len(ahead), microbatches=microbatches)


def _in_a_v(name: str, stages: int, microbatches: int, steps: Callable[[int], list[Step]]) -> Schedule:
    """Two stages per device, whose steps these are."""
    orders = [tuple(numbered(steps(device), microbatches)) for device in range(stages)]
    return Schedule(name=name, orders=orders, stages=2 * stages, microbatches=microbatches, chunks=2)
