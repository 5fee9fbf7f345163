"""Which implementation of an operation runs: chosen when it is traced, by the platform of the current mesh.

Every operation has a reference in plain JAX, `"xla"`, which the pass shards as any other code. Others run kernels, on
each device's shards. `"auto"` takes the first one that can run; the order is that of the operation's table.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import compat
from ..errors import ShardingError
from ..hardware import Platform
from ..mesh import platform

XLA = "xla"
"""The reference in plain JAX."""

_WITHOUT_BODIES: Any = jax.make_user_context(default_value=False)  # in the cache key of every trace

ONE_PASS = "one pass over memory forward, one backward"
"""Why there are kernels of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An implementation beside the reference."""

    name: str
    platforms: frozenset[Platform]
    """Where `"auto"` takes it; elsewhere it can be asked for, as far as `obstacle` allows."""
    obstacle: Callable[..., str]
    """(*operands, **options) -> why it can't run, or an empty text."""
    why: str
    """What it does better than the next ones."""


def choose(kernel: str, candidates: Sequence[Candidate], asked: str, *operands: Any, **options: Any) -> str:
    """Returns the name of the implementation to run.

    Args:
        kernel: name of the operation, for messages.
        candidates: its implementations but the reference, best first.
        asked: one of their names, `"xla"`, `"auto"`, or `"pallas"`: the Pallas kernel for the platform, interpreted on
            CPUs.
        operands: arrays, with shapes and dtypes.
        options: of the call, as `obstacle` takes them.

    Raises:
        ShardingError: an unknown implementation, or one that can't run.

    Warns:
        UserWarning: `"auto"` takes the reference although the platform has a kernel, and why.
    """
    names = [one.name for one in candidates]
    if asked == "pallas":
        asked = "mosaic_gpu" if platform() == "gpu" else "mosaic_tpu"
    call = f"kernels.{kernel}(..., implementation={asked!r})"
    if asked == XLA:
        return XLA
    if asked != "auto":
        if asked not in names:
            raise ShardingError(call, required=f"one of {', '.join(map(repr, ['auto', XLA, *names]))}")
        found = candidates[names.index(asked)]
        if obstacle := found.obstacle(*operands, **options):
            shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in operands if hasattr(x, "shape"))
            raise ShardingError(f"{call} of {shapes}", required=obstacle, fix="implementation='auto'")
        return asked
    here, obstacles = platform(), []
    for one in candidates:
        if here in one.platforms:
            obstacle = one.obstacle(*operands, **options)
            if not obstacle:
                return one.name
            obstacles.append(f"{one.name}: required {obstacle}")
    if obstacles:
        warnings.warn(f"kernels.{kernel} runs as plain JAX; {'; '.join(obstacles)}", stacklevel=3)
    return XLA


def runs_kernels(asked: str) -> bool:
    """Whether an operation may run a kernel on the current mesh: one is asked for, or `"auto"` and it isn't of CPUs.

    Example:
        >>> import sharding
        >>> from sharding import kernels
        >>> with sharding.mesh(data=8, devices="v5p:2x2x2"):
        ...     kernels.runs_kernels("auto"), kernels.runs_kernels("xla")
        (True, False)
    """
    return asked != XLA and (asked != "auto" or platform() != "cpu")


@dataclass(frozen=True, slots=True)
class Backend:
    """A compiler of Pallas kernels."""

    target: Platform
    """`"tpu"` or `"gpu"`."""
    is_interpreted: bool
    """Whether the kernel is run op by op, on a CPU."""

    @property
    def interpret(self) -> Any:
        """The `interpret=` of a `pallas_call` or GPU kernel."""
        if self.target == "tpu":
            return self.is_interpreted
        return getattr(plgpu, "InterpretGPUParams")() if self.is_interpreted else None  # noqa: B009 from JAX 0.11 on


BACKENDS: Mapping[str, Platform] = {"mosaic_tpu": "tpu", "mosaic_gpu": "gpu"}
"""Implementation -> the platform that it compiles for; elsewhere it is interpreted."""


def backend(implementation: str) -> Backend:
    """The compiler of an implementation that is one of `BACKENDS`."""
    target = BACKENDS[implementation]
    return Backend(target, is_interpreted=platform() != target)


def without_bodies() -> AbstractContextManager[None]:
    """The context in which kernels are traced as if they did nothing, for the arrays that they read and write."""
    return _WITHOUT_BODIES(True)


def _traced(body: Callable[..., None]) -> Callable[..., None]:
    return _nothing if _WITHOUT_BODIES.value else body


def _nothing(*refs: Any) -> None:
    del refs


def tpu_kernel(body: Callable[..., None], **options: Any) -> Callable[..., Any]:
    """A kernel of Mosaic TPU: `pallas_call` with its options."""
    return pl.pallas_call(_traced(body), **options)


def gpu_kernel(body: Callable[..., None], *, cost_estimate: pl.CostEstimate, **options: Any) -> Callable[..., Any]:
    """A kernel of Mosaic GPU, which says what it costs from JAX 0.12 on.

    Exponentials, logarithms and roots are the GPU's own, with relative errors of 2e-7; so is tanh, with 5e-4.
    """
    options["compiler_params"] = plgpu.CompilerParams(approx_math=True)
    if "cost_estimate" in inspect.signature(plgpu.kernel).parameters:
        options["cost_estimate"] = cost_estimate
    return plgpu.kernel(_traced(body), **options)


def load(ref: Any, layout: Any) -> jax.Array:
    """What a reference to a GPU's global memory has, in a layout of registers."""
    return getattr(plgpu, "load")(ref, layout=layout, optimized=False)  # noqa: B009 another signature in JAX 0.10


def unsupported(implementation: str) -> str:
    """What a Pallas compiler needs and this machine lacks, or an empty text."""
    if implementation == "mosaic_gpu" and not compat.HAS_MOSAIC_GPU:
        return f"JAX 0.11 or newer for Mosaic GPU, here is {jax.__version__}"
    here = platform()
    if here != "cpu" and BACKENDS[implementation] != here:
        return f"a mesh of {BACKENDS[implementation].upper()}s, or of CPUs to interpret it; here are {here.upper()}s"
    return ""
