"""1F1B that is never flushed: weights change while microbatches are under way, which go backward with those they met.

The table is a stretch of a run without end, from its beginning. The version of a task says how many updates the weights
have had with which it works; how many it misses is the schedule's staleness.
"""

from __future__ import annotations

from collections.abc import Callable

from ...errors import ShardingError
from ..schedule import Schedule
from ..table import at_least_one, is_count, whole_units
from .order import one_forward_one_backward


def pipedream(*, stages: int, microbatches: int, vertical_sync: bool = False) -> Schedule:
    """An update after every microbatch; each goes backward with the weights that it met forward (weight stashing).

    Stage s keeps stages - s versions of its weights and works with some that miss stages - 1 - s updates. No device is
    idle once the pipeline is full.

    Args:
        stages: one per device.
        microbatches: the paper's minibatches.
        vertical_sync: whether a microbatch meets the same version at all stages, the newest at the first one: all then
            miss stages - 1 updates, and keep ``stages`` versions.

    References:
        Narayanan et al., PipeDream, SOSP 2019, sections 3.2 and 3.3. Stages are not replicated here: replicate the
        whole pipeline over a data axis.
    """
    at_least_one("schedules.pipedream", stages=stages, microbatches=microbatches)

    def version(stage: int, microbatch: int) -> int:
        return max(0, microbatch - (stages - 1 if vertical_sync else stages - 1 - stage))

    ahead = [stages - stage for stage in range(stages)]
    return _unflushed("pipedream", ahead, microbatches, version, microbatches_per_update=1)


def pipedream_2bw(*, stages: int, microbatches: int, accumulate: int | None = None) -> Schedule:
    """An update after so many microbatches, which miss one update at every stage: two buffers of weights are enough.

    Args:
        stages: one per device.
        microbatches: of the whole stretch, a multiple of ``accumulate``.
        accumulate: microbatches whose gradients are added for an update, at least ``stages``: with fewer the version
            before the newest is not ready when it is needed. ``stages`` where it is not given.

    References:
        Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021 (2006.09503), section 3.1.
    """
    per_update = stages if accumulate is None else accumulate
    at_least_one("schedules.pipedream_2bw", stages=stages, microbatches=microbatches, accumulate=per_update)
    if per_update < stages:
        raise ShardingError(
            "schedules.pipedream_2bw(accumulate)",
            there=f"accumulate={per_update}, stages={stages}",
            must="at least as many as stages: else a third version of the weights is needed",
            fix=f"accumulate={stages}",
        )
    must = "a multiple of accumulate, so that all gradients are used"
    whole_units("schedules.pipedream_2bw", microbatches, per_update, must=must)

    def version(stage: int, microbatch: int) -> int:
        return max(0, microbatch // per_update - 1)

    ahead = [stages - stage for stage in range(stages)]
    return _unflushed("pipedream_2bw", ahead, microbatches, version, microbatches_per_update=per_update)


def hetpipe(
    *, stages: int, microbatches: int, concurrent: int | None = None, clock_distance: int | None = None
) -> Schedule:
    """One virtual worker: a pipeline over devices that may differ, with so many minibatches under way.

    A minibatch meets, at every stage, weights that miss at most the ``concurrent - 1`` before it. Several workers push
    the sum of ``concurrent`` minibatches (a wave) and wait for each other so that none begins a wave before all have
    pushed what is more than ``clock_distance`` waves old. With D = ``clock_distance`` and s = ``concurrent`` - 1 a
    minibatch then misses at most (D + 1)(s + 1) + s - 1 minibatches of another worker; the tasks' versions count what
    surely is there.

    Args:
        stages: one per device; uneven ones are told to ``simulate`` as a sequence of times.
        microbatches: the paper's minibatches, of this worker.
        concurrent: minibatches under way, at most 2 stages - 1; ``stages`` where it is not given.
        clock_distance: waves that workers may be apart; None for a single worker.

    References:
        Park et al., HetPipe, USENIX ATC 2020, sections 4 and 5 (wave synchronous parallel).
    """
    count = stages if concurrent is None else concurrent
    at_least_one("schedules.hetpipe", stages=stages, microbatches=microbatches, concurrent=count)
    most = 2 * stages - 1
    if count > most:
        must = f"at most 2 stages - 1 = {most} can be under way before the first backward is at the first stage"
        raise ShardingError("schedules.hetpipe(concurrent)", there=f"{count}", must=must, fix=f"concurrent={most}")
    if clock_distance is not None and (not is_count(clock_distance) or clock_distance < 0):
        must = "a whole number from 0, or None"
        raise ShardingError("schedules.hetpipe(clock_distance)", there=repr(clock_distance), must=must)

    def version(stage: int, microbatch: int) -> int:
        if clock_distance is None:
            return max(0, microbatch - (count - 1))
        waves_done = (microbatch + 1) // count - 1  # when it is admitted: the worker's own clock
        return max(0, waves_done - clock_distance) * count

    longest = max(stages, count)  # each stage is one microbatch less ahead than the one before, as far as it can be
    ahead = [min(count, longest - stage, 2 * (stages - stage) - 1) for stage in range(stages)]
    return _unflushed("hetpipe", ahead, microbatches, version, microbatches_per_update=1)


def _unflushed(
    name: str,
    ahead: list[int],
    microbatches: int,
    version: Callable[[int, int], int],
    microbatches_per_update: int,
) -> Schedule:
    """A stretch of a run in which each stage sends so many microbatches ahead."""
    return Schedule(
        name=name,
        orders=one_forward_one_backward(ahead, microbatches, version=version),
        stages=len(ahead),
        microbatches=microbatches,
        microbatches_per_update=microbatches_per_update,
    )
