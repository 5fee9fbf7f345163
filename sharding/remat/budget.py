"""`fit`: what a program keeps, recomputes and offloads within a number of bytes per device."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from operator import itemgetter
from typing import Any, Literal, get_args

from jax.sharding import Mesh

from ..display import Column, Table, Tabular
from ..display.units import bytes_text, seconds_text
from ..errors import ShardingError
from ..explain.largest_batch import larger_axis_hint
from ..explain.peak_error import PEAK_ERRORS
from ..hardware import Chip, Devices
from ..mesh import current
from .auto_policy import Choice, Group, chosen
from .budget_program import AutoProgram, Value, recorded
from .budget_search import Cost, Options
from .compiled_peaks import Compiled
from .policy import Policy

Peak = Literal["auto", "predicted", "compiled"]
"""Which peak memory is limited, and which choices compile: see `fit`."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Fitted(Tabular):
    """What a program keeps, recomputes and offloads, and what it then takes of each device."""

    memory_bytes: float
    """The budget."""
    policies: Mapping[Group, Policy]
    """For `jax.checkpoint(fun, policy=...)`, by the group of `remat.auto[group]`; `None` is that of `remat.auto`."""
    cost: Cost
    """Predicted, with this choice."""
    chip: str
    """The chip, or devices, of the predicted times."""
    compiled_bytes: int | None
    """The peak that XLA allocates; None if nothing compiled."""
    least: Cost
    """With nothing kept."""
    tradeoffs: tuple[Cost, ...]
    """The best programs for other budgets, least memory first."""
    values: tuple[Value, ...]
    _program: AutoProgram
    _found: tuple[tuple[Options, Cost], ...]
    _step: Any
    """With the compiled program, if there is one."""

    def within(self, memory_bytes: float, *, peak: Peak = "auto") -> Fitted:
        """The same for another limit, without another search; compiled peaks are remembered.

        Raises:
            ShardingError: a limit that no choice meets, as for `fit`.
        """
        _check_limit("Fitted.within", memory_bytes)
        _check_peak("Fitted.within", peak)
        return _chosen(self._program, self._found, memory_bytes, peak)

    @property
    def policy(self) -> Policy:
        """The policy of all blocks.

        Raises:
            ShardingError: groups of blocks have different ones.
        """
        found = {*self.policies.values()}
        if len(found) > 1:
            raise ShardingError(
                "remat.fit(...).policy",
                found=[f"group {group!r} {policy}" for group, policy in self.policies.items()],
                required="one policy for all groups",
                fix=".policies[group]",
            )
        return found.pop()

    @property
    def peak_bytes(self) -> int:
        """Predicted peak memory per device."""
        return self.cost.peak_bytes

    @property
    def range_bytes(self) -> tuple[int, int]:
        """Where the compiled peak lies for nine of ten programs with this predicted peak."""
        error = PEAK_ERRORS[self._program.platform]
        return int(self.peak_bytes * error.low), int(self.peak_bytes * error.high)

    @property
    def step(self) -> Fixed:
        """The step with this choice, whatever the context that it is called in; what `fit` compiled runs."""
        return Fixed(self._step, Choice(tuple(self.policies.items())))

    def tables(self) -> list[Table]:
        """One row per value; then the best programs for other budgets."""
        columns = (
            Column("value"),
            Column("action"),
            Column("bytes", "bytes"),
            Column("FLOPs", "number"),
            Column("source", "code"),
        )
        rows = [(v.name, v.action, v.num_bytes, int(v.flops), v.source) for v in self.values]
        costs = (
            Column("peak", "bytes"),
            Column("on the host", "bytes"),
            Column("FLOPs", "number"),
            Column("time", "seconds"),
        )
        others = [(c.peak_bytes, c.host_bytes, int(c.flops), c.seconds) for c in self.tradeoffs]
        return [Table(self._title(), columns, rows), Table("best programs by budget", costs, others)]

    def _title(self) -> str:
        found = self.cost
        parts = [f"peak {bytes_text(found.peak_bytes)} of {bytes_text(int(self.memory_bytes))} per device"]
        if self.compiled_bytes is not None:
            parts.append(f"{bytes_text(self.compiled_bytes)} compiled")
        if found.host_bytes:
            parts.append(f"{bytes_text(found.host_bytes)} in the host's memory")
        more = found.flops / self.least.flops - 1 if self.least.flops else 0.0
        parts.append(f"{found.flops:.4g} FLOPs ({more:+.1%} of those with nothing kept)")
        parts.append(f"estimated {seconds_text(found.seconds)} on {self.chip}")
        return ", ".join(parts)

    def __str__(self) -> str:
        values, others = self.tables()
        return "\n".join([str(values), *self.notes(), "", str(others)])

    def notes(self) -> list[str]:
        """How far compiled programs are from the prediction, where this one was not compiled."""
        if self.compiled_bytes is not None:
            return []
        low, high = map(bytes_text, self.range_bytes)
        return [f"compiled, nine of ten such programs take {low} to {high}"]

    __repr__ = __str__


class Fixed:
    """A step of `sharding.jit` with a choice of what to keep."""

    def __init__(self, step: Any, choice: Choice):
        functools.update_wrapper(self, step)
        self._step, self._choice = step, choice

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with chosen(self._choice):
            return self._step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """`complete`, `trace`, `lower` and `eval_shape` with the choice."""
        attribute = getattr(self._step, name)
        if not callable(attribute):
            return attribute

        @functools.wraps(attribute)
        def run(*args: Any, **kwargs: Any) -> Any:
            with chosen(self._choice):
                return attribute(*args, **kwargs)

        return run


def fit(
    step: Any,
    *args: Any,
    memory_bytes: float,
    names: Sequence[str] | None = None,
    host_memory_bytes: float | None = None,
    peak: Peak = "auto",
    hardware: Devices | Chip | str | None = None,
) -> Fitted:
    """Chooses what the blocks of a program keep for their backward, so that its peak memory is within a limit.

    For the blocks that are wrapped in `jax.checkpoint(block, policy=remat.auto)`. Each of their values that has a name
    (`jax.ad_checkpoint.checkpoint_name`), and each result of a matmul or convolution, is kept, computed again, or moved
    to the host. Of each `remat.scan(..., schedule=remat.auto)`, the number of snapshots on the device is chosen
    (`remat.revolve`), or all residuals are kept. A value in several blocks is treated alike in all of them; blocks in
    different groups, `policy=remat.auto[k]`, may differ where that comes closer to the limit.

    Programs are predicted by `step.complete` under the current mesh, some tens of them. The fastest one within the
    limit then compiles, and where XLA allocates more than the limit for it, the next ones with less memory, until one
    is within; `.step` runs what has been compiled. On described devices nothing compiles, and the limit is that of the
    prediction, which the compiled program may exceed: `.range_bytes`. The programs to choose from do not depend on the
    limit: a larger one never gives a slower program, in estimated time.

    Args:
        step: of `sharding.jit`, with the derivative inside.
        args: its arguments, arrays or shapes.
        memory_bytes: limit of peak memory per device: of arguments, results and temporaries.
        names: decides on these named values only; the others run again.
        host_memory_bytes: limit of the host's memory per device for what is offloaded; 0 offloads nothing. Default: a
            device's share of what hosts of the mesh's chips have, where that is known, and else 0.
        peak: what is within the limit. `"auto"`: the prediction and what XLA allocates, on described devices the
            prediction; `"predicted"`: the prediction, and nothing compiles; `"compiled"`: what XLA allocates, whatever
            the prediction: programs compile from the fastest one on, until one is within.
        hardware: as for `Completion.estimate`. Without known devices times are those of a v5p, an H100 or a CPU.

    Raises:
        ShardingError: a limit that no choice meets, with the least that would do, and what fills it; no block
            with `policy=remat.auto`; names that the program does not have; a step without `.complete`.

    Example:
        >>> import jax, sharding
        >>> from jax import numpy as jnp
        >>> from sharding import remat
        >>> def loss(ws, x):
        ...     for w in ws:
        ...         x = jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(x) @ w), policy=remat.auto)(w, x)
        ...     return x.sum()
        >>> step = sharding.jit(jax.grad(loss))
        >>> args = [jnp.ones((64, 64))] * 4, jnp.ones((4096, 64))
        >>> with sharding.mesh(data=8):
        ...     fitted = remat.fit(step, *args, memory_bytes=12e6)
        ...     grads = fitted.step(*args)
        >>> fitted.compiled_bytes <= 12e6
        True
    """
    _check(step, memory_bytes, peak)
    _check_options(names, host_memory_bytes)
    program = AutoProgram.of(step, args, names=names, host_memory_bytes=host_memory_bytes, hardware=hardware)
    return _chosen(program, program.tradeoffs(), memory_bytes, peak)


def _chosen(program: AutoProgram, found: Sequence[tuple[Options, Cost]], memory_bytes: float, peak: Peak) -> Fitted:
    """The fastest of the trade-offs within a limit."""
    if peak == "compiled":
        candidates = ((program.choice(options), cost) for options, cost in reversed(found))
    else:
        candidates = program.within(found, memory_bytes)
    if peak == "compiled" or (peak == "auto" and isinstance(current(), Mesh)):
        choice, cost, compiled = _first_compiled(program, candidates, memory_bytes)
    else:
        choice, cost = next(candidates)
        compiled = Compiled(None, program.step)
        if cost.peak_bytes > memory_bytes:
            raise _too_little(program, choice, memory_bytes, cost.peak_bytes, "predicted")
    return Fitted(
        memory_bytes=memory_bytes,
        policies=dict(choice.policies),
        cost=cost,
        chip=program.chip,
        compiled_bytes=compiled.peak_bytes,
        least=program.least,
        tradeoffs=tuple(cost for _, cost in found),
        values=tuple(program.values(choice)),
        _program=program,
        _found=tuple(found),
        _step=compiled.step,
    )


def names(step: Any, *args: Any) -> tuple[str, ...]:
    """The names that `checkpoint_name` gives to values in the blocks with `policy=remat.auto`, for `fit(names=...)`.

    Args:
        step: of `sharding.jit`, with the derivative inside.
        args: its arguments, arrays or shapes.

    Example:
        >>> import jax, sharding
        >>> from jax import numpy as jnp
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> from sharding import remat
        >>> layer = jax.checkpoint(lambda w, x: jnp.tanh(checkpoint_name(x @ w, "hidden")), policy=remat.auto)
        >>> step = sharding.jit(jax.grad(lambda w, x: layer(w, x).sum()))
        >>> with sharding.mesh(data=8):
        ...     remat.names(step, jnp.ones((4, 4)), jnp.ones((8, 4)))
        ('hidden',)
    """
    _, recorder = recorded(step.with_empty_cache(), args)
    return tuple(dict.fromkeys(key[1] for asked in recorder.asked.values() for key in asked if key[0] == "name"))


def _first_compiled(
    program: AutoProgram, candidates: Iterator[tuple[Choice, Cost]], memory_bytes: float
) -> tuple[Choice, Cost, Compiled]:
    """The first choice whose compiled peak is within a limit."""
    peaks = []
    for choice, cost in candidates:
        compiled = program.compiled.of(choice)
        if compiled.peak_bytes is None:
            continue
        if compiled.peak_bytes <= memory_bytes:
            return choice, cost, compiled
        peaks.append((compiled.peak_bytes, choice))
    if not peaks:
        raise _refused(program)
    least, choice = min(peaks, key=itemgetter(0))
    raise _too_little(program, choice, memory_bytes, least, "compiled")


def _check(step: Any, memory_bytes: float, peak: str) -> None:
    if not callable(getattr(step, "with_empty_cache", None)):
        raise ShardingError(
            "remat.fit(step)",
            found=f"{type(step).__name__} {getattr(step, '__name__', '')}".strip(),
            required="a step of sharding.jit, whose memory can be predicted",
            fix="remat.fit(sharding.jit(step), ...)",
        )
    _check_limit("remat.fit", memory_bytes)
    _check_peak("remat.fit", peak)


def _check_options(names: Sequence[str] | None, host_memory_bytes: float | None) -> None:
    if isinstance(names, str):
        raise ShardingError(f"remat.fit(names={names!r})", required="a sequence of names", fix=f"names=[{names!r}]")
    if host_memory_bytes is not None and not (_is_number(host_memory_bytes) and host_memory_bytes >= 0):
        raise ShardingError(
            f"remat.fit(host_memory_bytes={host_memory_bytes!r})",
            required="bytes per device, at least 0, or None",
            fix="host_memory_bytes=0",
        )


def _check_peak(asked: str, peak: str) -> None:
    if peak not in get_args(Peak):
        raise ShardingError(f"{asked}(peak={peak!r})", required=" or ".join(map(repr, get_args(Peak))))


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def _check_limit(asked: str, memory_bytes: float) -> None:
    if not (_is_number(memory_bytes) and 0 < memory_bytes < math.inf):
        raise ShardingError(
            f"{asked}(memory_bytes={memory_bytes!r})", required="bytes per device, above 0", fix="memory_bytes=16e9"
        )


def _too_little(
    program: AutoProgram, choice: Choice, memory_bytes: float, least: int, peak: Literal["predicted", "compiled"]
) -> ShardingError:
    report = program.completed(choice).memory()
    parts = [f"{bytes_text(num_bytes)} of {kind}" for kind, num_bytes in report.by_class.items()]
    largest = next(iter(report.grouped()), None)
    where = [f"largest: {largest[0]} {largest[1][0].source}".rstrip()] if largest else []
    return ShardingError(
        f"remat.fit({report.name}, memory_bytes={memory_bytes:g})",
        found=[
            f"at least {least:,} bytes ({bytes_text(least)}) {peak}, whatever is recomputed",
            f"predicted: {', '.join(parts[:4])}",
            *where,
        ],
        required="a limit that some choice meets",
        fix=[f"memory_bytes={least}", larger_axis_hint(report), "a smaller batch, or accumulated gradients"],
    )


def _refused(program: AutoProgram) -> ShardingError:
    return ShardingError(
        f"remat.fit({program.step.__name__})",
        found=program.compiled.refusal.splitlines()[:3],
        required="a choice that XLA compiles for these devices",
        fix=["a larger mesh", "a smaller batch, or accumulated gradients"],
    )
