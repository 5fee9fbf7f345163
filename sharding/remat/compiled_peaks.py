"""`CompiledPeaks`: what XLA allocates for a step under choices, each of which compiles once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import jax
from jax.sharding import Mesh

from ..cost import read_compiled
from ..errors import ShardingError
from ..mesh import current
from .auto_policy import Choice, chosen

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
"""How XLA's error begins where its compiler refuses a program that its devices have no memory for, as XLA:TPU does."""


class Compiled(NamedTuple):
    """A step under one choice."""

    peak_bytes: int | None
    """Per device; None if nothing compiled, as where XLA refuses it."""
    step: Any
    """With the compiled program in its cache, as long as someone holds it; else one that compiles when called."""


@dataclass(slots=True, eq=False)
class CompiledPeaks:
    """The compiled peaks of a step."""

    step: Any
    """Of `sharding.jit`."""
    args: Sequence[Any]
    refusal: str = ""
    """XLA's latest."""
    _peaks: dict[Any, int | None] = field(default_factory=dict)
    _steps: WeakValueDictionary[Any, Any] = field(default_factory=WeakValueDictionary)
    """The compiled steps that are in use: the others leave no programs behind."""

    def of(self, choice: Choice) -> Compiled:
        """The step under a choice, on the current mesh.

        Raises:
            ShardingError: described devices, or a backend that does not say what it allocates.
        """
        mesh = current()
        if not isinstance(mesh, Mesh):
            raise ShardingError(
                f'remat.fit({self.step.__name__}, peak="compiled")',
                found="a mesh over described devices",
                required="devices that XLA compiles for",
                fix=['peak="predicted"', "sharding.mesh(..., devices=sharding.cost.compile_only(...))"],
            )
        key = mesh, choice
        if key in self._peaks:
            return Compiled(self._peaks[key], self._steps.get(key, self.step))
        step = self.step.with_empty_cache()
        self._peaks[key], self._steps[key] = self._compiled_peak(step, choice), step
        return Compiled(self._peaks[key], step)

    def _compiled_peak(self, step: Any, choice: Choice) -> int | None:
        try:
            with chosen(choice):
                compiled = step.lower(*self.args).compile()
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith(OUT_OF_MEMORY):
                raise
            self.refusal = str(error)
            return None
        memory = read_compiled(compiled).memory
        if memory is None:
            raise ShardingError(
                f"remat.fit({self.step.__name__})",
                found="a backend without memory analysis",
                required="one that says what it allocates",
                fix='peak="predicted"',
            )
        return memory.peak_bytes
