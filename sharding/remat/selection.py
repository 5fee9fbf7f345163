"""`select`: which values a function saves for its backward within a number of bytes, as a `jax.checkpoint` policy."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import jax

from ..display import Column, Table, Tabular
from ..display.units import bytes_text
from ..errors import ShardingError
from .linearized_program import Key, Program, linearized, saved_bytes
from .policy import Policy
from .selection_solvers import SOLVERS, Algorithm, Plan, plan


@dataclass(frozen=True, kw_only=True, repr=False)
class Selection(Tabular):
    """What a function saves for its backward, and what it runs again."""

    policy: Policy
    """For `jax.checkpoint(fun, policy=...)`."""
    saved_bytes: int
    """Bytes that JAX keeps with this policy, beside the function's arguments."""
    flops: float
    """Of the ops that run twice, forward and again in the backward."""
    most_flops: float
    """Of those that run twice if nothing is saved."""
    values: tuple[tuple[str, str, int, int, float, bool], ...]
    """(name or op, source line, values, bytes, FLOPs of their ops, saved or not), of values that may be saved."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names given by `checkpoint_name` whose values are saved."""
        return tuple(sorted(key[1] for key in self.policy.saved if key[0] == "name"))

    def tables(self) -> list[Table]:
        """One row per name, and per kind of unnamed op: all its values are saved, or none."""
        columns = (
            Column("value"),
            Column("saved"),
            Column("count", "number"),
            Column("bytes", "bytes"),
            Column("FLOPs", "number"),
            Column("source", "code"),
        )
        rows = [
            (name, "saved" if is_saved else "", count, num_bytes, int(flops), source)
            for name, source, count, num_bytes, flops, is_saved in self.values
        ]
        share = self.flops / self.most_flops if self.most_flops else 0.0
        title = f"saves {bytes_text(self.saved_bytes)}, runs {self.flops:.3g} FLOPs again ({share:.0%} of all)"
        return [Table(title, columns, rows)]

    def __str__(self) -> str:
        return str(self.tables()[0])

    __repr__ = __str__


def select(
    fun: Callable[..., Any],
    *args: Any,
    memory_bytes: float,
    names: Sequence[str] | None = None,
    algorithm: Algorithm = "exact",
) -> Selection:
    """The values to save for the backward of a function that leave least to run again, within a number of bytes.

    For one block of a model, such as a layer, whose derivative is taken by its floats. A named value
    (`jax.ad_checkpoint.checkpoint_name`) is chosen by its name. An unnamed one is what a policy sees of its op:
    primitive, operand types and parameters. Ops that agree in these are chosen together.

    Args:
        fun: the block, without `jax.checkpoint`.
        args: its arguments, arrays or shapes.
        memory_bytes: limit of the values kept beside the arguments; what runs again takes memory only while it runs.
        names: chooses among these named values only.
        algorithm: ``"exact"`` solves a mixed-integer program; ``"greedy"`` adds the value that avoids most FLOPs per
            byte, one after the other.

    Raises:
        ShardingError: names that the function does not have; a limit below what the function keeps if nothing is saved,
            as a loop in it may, with the least that would do.

    Example:
        >>> import jax
        >>> from jax import numpy as jnp
        >>> from sharding import remat
        >>> def layer(x, w1, w2):
        ...     return jnp.tanh(jnp.tanh(x @ w1) @ w2)
        >>> x, w1, w2 = jnp.ones((32, 64)), jnp.ones((64, 64)), jnp.ones((64, 16))
        >>> s = remat.select(layer, x, w1, w2, memory_bytes=10_000)
        >>> s.saved_bytes, int(s.flops), int(s.most_flops)
        (8192, 73728, 368640)
        >>> layer = jax.checkpoint(layer, policy=s.policy)

    References:
        Jain et al., Checkmate: breaking the memory wall with optimal tensor rematerialization, MLSys 2020
        (1910.02653): the program for one stage.
    """
    _check(memory_bytes, algorithm)
    program = linearized(fun, *args)
    keys = list(dict.fromkeys(op.key for op in program.ops if op.is_saveable))
    if names is not None:
        keys = _named(keys, names)
    nothing = plan(program, ())
    best = _fitting(fun, args, program, keys, memory_bytes, algorithm)
    return Selection(
        policy=Policy(best.saved),
        saved_bytes=_kept(fun, args, best),
        flops=best.flops,
        most_flops=nothing.flops,
        values=tuple(_values(program, keys, best)),
    )


def _check(memory_bytes: float, algorithm: str) -> None:
    if not isinstance(memory_bytes, Real) or isinstance(memory_bytes, bool):
        raise ShardingError(f"remat.select(memory_bytes={memory_bytes!r})", required="a number of bytes", fix="1e6")
    if algorithm not in SOLVERS:
        raise ShardingError(f"remat.select(algorithm={algorithm!r})", required=" or ".join(map(repr, SOLVERS)))


def _fitting(
    fun: Callable[..., Any], args: Sequence[Any], program: Program, keys: list[Key], limit: float, algorithm: Algorithm
) -> Plan:
    """A plan whose bytes, as JAX keeps them, are within the limit: a loop may keep more than its program says."""
    within = limit
    while within >= 0:
        best = SOLVERS[algorithm](program, keys, within)
        over = _kept(fun, args, best) - limit
        if over <= 0:
            return best
        within = min(within, best.num_bytes) - over if best.saved else -1
    least = _kept(fun, args, plan(program, ()))
    raise ShardingError(
        "remat.select(memory_bytes)",
        found=f"{limit:,g} bytes",
        required=f"at least {least:,} bytes, which the function keeps with nothing saved",
        fix=f"memory_bytes={least}",
    )


def _kept(fun: Callable[..., Any], args: Sequence[Any], best: Plan) -> int:
    return saved_bytes(jax.checkpoint(fun, policy=Policy(best.saved)), *args)


def _named(keys: Sequence[Key], names: Sequence[str]) -> list[Key]:
    found = {key[1]: key for key in keys if key[0] == "name"}
    unknown = [name for name in names if name not in found]
    if unknown:
        near = [close for name in unknown for close in difflib.get_close_matches(name, list(found), n=1, cutoff=0.4)]
        raise ShardingError(
            f"remat.select(names={list(names)!r})",
            found=f"no value named {', '.join(map(repr, unknown))}; names are {', '.join(sorted(found)) or 'none'}",
            required="names given by checkpoint_name in the function",
            fix=[f"did you mean {one!r}?" for one in near],
        )
    return [found[name] for name in names]


def _values(program: Program, keys: Sequence[Key], best: Plan) -> Iterator[tuple[str, str, int, int, float, bool]]:
    """The rows of the table, largest first."""
    rows = []
    for key in keys:
        ops = [op for op in program.ops if op.key == key]
        num_bytes = sum(program.num_bytes[value] for op in ops for value in op.results)
        source = next((op.source for op in ops if op.source), "")
        name = key[1] if key[0] == "name" else key[0]
        rows.append((name, source, len(ops), num_bytes, sum(op.flops for op in ops), key in best.saved))
    yield from sorted(rows, key=lambda row: (-row[5], -row[4], -row[3]))
