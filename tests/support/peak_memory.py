"""Predicted and compiled peak memory of a program."""

from dataclasses import dataclass

import jax
import pytest

import sharding
from sharding.memory import usage

from . import compilers

newest_jax_only = pytest.mark.skipif(
    jax.__version_info__ < (0, 12),
    reason="JAX 0.10.2 undoes remat and orders, fuses and partitions differently",
)


@dataclass(frozen=True)
class Peak:
    """Bytes per device of one program."""

    predicted: int
    compiled: int

    @property
    def ratio(self):
        return self.predicted / self.compiled


def peak_of_step(step, sizes):
    """Peaks of a train step with its state donated."""
    return peak_of(step.run, *step.args, sizes=sizes, in_shardings=step.specs, donate_argnums=0)


def peak_of(f, *args, sizes, **options):
    """Peaks of a function, with its first argument donated if `donate_argnums` is given."""
    with sharding.mesh(sizes):
        jitted = sharding.jit(f, **options)
        donated = range(len(jax.tree.leaves(args[0]))) if "donate_argnums" in options else ()
        found = usage(jitted.complete(*args).assignment, donated)
        return Peak(found.peak_bytes, compiled_bytes(jitted.lower(*args)))


def compiled_bytes(lowered):
    """Argument + temporary + output - aliased bytes; XLA:CPU's own peak figure is not a peak."""
    found = lowered.compile().memory_analysis()
    own = found.argument_size_in_bytes + found.temp_size_in_bytes
    return own + found.output_size_in_bytes - found.alias_size_in_bytes


def temporary_bytes(f, args, platform):
    """As predicted for one device."""
    with sharding.mesh({"data": 1}, devices=jax.devices()[:1]):
        return usage(sharding.jit(f).complete(*args).assignment, platform=platform).temporary_bytes


def compiled_temporary_bytes(f, args, described, **options):
    """As compiled for one of the described devices, with options of `jax.jit`."""
    return compilers.compiled_for_one(f, args, described, **options).memory_analysis().temp_size_in_bytes


def check_temporaries(program, unit, platform="tpu", *, parts=50):
    """Compares those predicted of a program on one device with what it says.

    Args:
        program: a function, its arguments, and the number of arrays that it stores.
        unit: the bytes of such an array.
        parts: of such an array, of which the difference is at most one.
    """
    f, args, count = program
    assert temporary_bytes(f, args, platform) == pytest.approx(count * unit, abs=unit // parts)


def check_compiled_temporaries(program, unit, described="v5p:2x2x2", *, parts=50):
    """Compares those of the compiled program: see `check_temporaries`."""
    f, args, count = program
    assert compiled_temporary_bytes(f, args, described) == pytest.approx(count * unit, abs=unit // parts)


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")
