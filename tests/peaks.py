"""The memory that a step is predicted to need, and what the compiler says that it needs."""

from dataclasses import dataclass

import jax
import pytest

import sharding
from sharding.memory import usage

NEWEST = pytest.mark.skipif(
    jax.__version_info__ < (0, 12),
    reason="JAX 0.10.2 undoes remat and orders, fuses and partitions otherwise",
)


@dataclass(frozen=True)
class Peak:
    """Bytes per device of one program."""

    predicted: int
    compiled: int

    @property
    def ratio(self):
        return self.predicted / self.compiled


def of_step(step, sizes):
    """Both peaks of a train step whose state is donated."""
    return of(step.run, *step.args, sizes=sizes, in_shardings=step.specs, donate_argnums=0)


def of(f, *args, sizes, **options):
    """Both peaks of a function, of which the first argument may be donated."""
    with sharding.mesh(sizes):
        jitted = sharding.jit(f, **options)
        donated = range(len(jax.tree.leaves(args[0]))) if "donate_argnums" in options else ()
        found = usage(jitted.complete(*args).assignment, donated)
        return Peak(found.peak_bytes, compiled_bytes(jitted.lower(*args)))


def compiled_bytes(lowered):
    """Argument + temp + output - alias bytes; the peak that XLA:CPU names is none."""
    found = lowered.compile().memory_analysis()
    own = found.argument_size_in_bytes + found.temp_size_in_bytes
    return own + found.output_size_in_bytes - found.alias_size_in_bytes


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")
