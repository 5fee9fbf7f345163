"""Asynchronous 1F1B without flushes: weights change while microbatches are in flight.

Each microbatch runs forward and backward with the same weight version (weight stashing). The table is the start of an
unending run. A task's version is the number of updates applied to its weights; the updates that they lack are the
schedule's staleness.
"""

from __future__ import annotations

from collections.abc import Callable

from ...errors import ShardingError
from ..schedule import Schedule
from ..task_table import check_multiple, check_positive, is_integer
from .device_order import one_forward_one_backward


def pipedream(*, stages: int, microbatches: int, vertical_sync: bool = False) -> Schedule:
    """PipeDream: an update after every microbatch, and backwards with the weights of the forward (weight stashing).

    Stage s stashes stages - s versions of its weights, with a staleness of stages - 1 - s updates. The steady state has
    no bubbles.

    Args:
        stages: one per device.
        microbatches: the paper's minibatches.
        vertical_sync: whether a microbatch uses the same version at all stages, the newest at the first stage; every
            stage then has a staleness of stages - 1 updates and stashes ``stages`` versions.

    References:
        Narayanan et al., PipeDream, SOSP 2019, sections 3.2 and 3.3. Stages are not replicated here: replicate the
        pipeline over a data axis.
    """
    check_positive("schedules.pipedream", stages=stages, microbatches=microbatches)

    def version(stage: int, microbatch: int) -> int:
        return max(0, microbatch - (stages - 1 if vertical_sync else stages - 1 - stage))

    warmup = [stages - stage for stage in range(stages)]
    return _without_flush("pipedream", warmup, microbatches, version, microbatches_per_update=1)


def pipedream_2bw(*, stages: int, microbatches: int, accumulate: int | None = None) -> Schedule:
    """PipeDream-2BW: gradient accumulation with a staleness of one update at every stage, in two weight buffers.

    Args:
        stages: one per device.
        microbatches: in total, a multiple of ``accumulate``.
        accumulate: microbatches per update, at least ``stages``: with fewer, the previous version is not ready in time.
            Defaults to ``stages``.

    References:
        Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021 (2006.09503), section 3.1.
    """
    per_update = stages if accumulate is None else accumulate
    check_positive("schedules.pipedream_2bw", stages=stages, microbatches=microbatches, accumulate=per_update)
    if per_update < stages:
        raise ShardingError(
            "schedules.pipedream_2bw(accumulate)",
            found=f"accumulate={per_update}, stages={stages}",
            required="accumulate at least stages; fewer need a third version of the weights",
            fix=f"accumulate={stages}",
        )
    must = "a multiple of accumulate, so that every gradient is applied"
    check_multiple("schedules.pipedream_2bw", microbatches, per_update, required=must)

    def version(stage: int, microbatch: int) -> int:
        return max(0, microbatch // per_update - 1)

    warmup = [stages - stage for stage in range(stages)]
    return _without_flush("pipedream_2bw", warmup, microbatches, version, microbatches_per_update=per_update)


def hetpipe(
    *, stages: int, microbatches: int, concurrent: int | None = None, clock_distance: int | None = None
) -> Schedule:
    """HetPipe: one virtual worker, a pipeline over possibly unequal devices with `concurrent` minibatches in flight.

    At every stage a minibatch uses weights that lack at most the ``concurrent - 1`` minibatches before it. Several
    workers push the sum of ``concurrent`` minibatches' updates (a wave), and none starts a wave before all have pushed
    the waves more than ``clock_distance`` older. With D = ``clock_distance`` and s = ``concurrent`` - 1, a minibatch
    then lacks at most (D + 1)(s + 1) + s - 1 minibatches of another worker; the tasks' versions count the updates that
    are guaranteed.

    Args:
        stages: one per device; for unequal devices, give ``simulate`` a sequence of times.
        microbatches: the paper's minibatches, of this worker.
        concurrent: minibatches in flight, at most 2 stages - 1; defaults to ``stages``.
        clock_distance: waves by which workers may be apart; None for a single worker.

    References:
        Park et al., HetPipe, USENIX ATC 2020, sections 4 and 5 (wave synchronous parallel).

    Example:
        >>> from sharding.pipeline import schedules
        >>> print(schedules.hetpipe(stages=2, microbatches=4, concurrent=2))
        device 0:  F0  F1  B0  F2  B1  F3  B2  B3
        device 1:  F0  B0  F1  B1  F2  B2  F3  B3
    """
    count = stages if concurrent is None else concurrent
    check_positive("schedules.hetpipe", stages=stages, microbatches=microbatches, concurrent=count)
    most = 2 * stages - 1
    if count > most:
        must = f"at most 2 stages - 1 = {most}, the minibatches in flight when the first backward reaches stage 0"
        raise ShardingError("schedules.hetpipe(concurrent)", found=f"{count}", required=must, fix=f"concurrent={most}")
    if clock_distance is not None and (not is_integer(clock_distance) or clock_distance < 0):
        must = "a non-negative integer, or None"
        raise ShardingError("schedules.hetpipe(clock_distance)", found=repr(clock_distance), required=must)

    def version(stage: int, microbatch: int) -> int:
        if clock_distance is None:
            return max(0, microbatch - (count - 1))
        waves_done = (microbatch + 1) // count - 1  # on admission: the worker's local clock
        return max(0, waves_done - clock_distance) * count

    longest = max(stages, count)  # warm-up shrinks by one per stage, within the limit
    warmup = [min(count, longest - stage, 2 * (stages - stage) - 1) for stage in range(stages)]
    return _without_flush("hetpipe", warmup, microbatches, version, microbatches_per_update=1)


def _without_flush(
    name: str,
    warmup: list[int],
    microbatches: int,
    version: Callable[[int, int], int],
    microbatches_per_update: int,
) -> Schedule:
    """A run without flushes, with `warmup[s]` forwards in the warm-up of stage s."""
    return Schedule(
        name=name,
        orders=one_forward_one_backward(warmup, microbatches, version=version),
        stages=len(warmup),
        microbatches=microbatches,
        microbatches_per_update=microbatches_per_update,
    )
