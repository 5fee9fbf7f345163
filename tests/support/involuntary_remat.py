"""Programs in which XLA's partitioner by itself all-gathers an array to reshard it, with a warning.

The warning, "Involuntary full rematerialization", is written to stderr from C++. Each program annotates the sharding of
an array before and after; the compiler chooses the steps in between.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import sharding
from sharding import P, annotate, cost

WARNING = "nvoluntary full rematerialization"
NHWC = ("NHWC", "HWIO", "NHWC")


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


@dataclass(frozen=True)
class Program:
    """A function, argument shapes and specs, and mesh axis sizes."""

    sizes: Mapping[str, int]
    run: Callable[..., Any]
    args: tuple[Any, ...]
    specs: tuple[Any, ...]


def reshard_to(spec: P) -> Callable[[jax.Array], jax.Array]:
    """An elementwise function that reshards an intermediate value to `spec`."""
    return lambda x: jnp.cos(annotate(jnp.sin(x), spec))


def merged(x):
    return jnp.cos(annotate(jnp.sin(x).reshape(512, 32), P(None, ("data", "tensor"))))


def heads_to_positions(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))
    mixed = jnp.einsum("bhst,bthd->bshd", weights, v)
    return annotate(mixed.reshape(8, 64, -1), P(None, ("data", "tensor")))


def positions_to_heads(q):
    q = annotate(jnp.tanh(q), P("data", "tensor"))
    return annotate(jnp.sin(q), P(None, None, ("data", "tensor")))


def experts(x, w):
    hidden = annotate(jnp.einsum("bsm,emf->besf", x, w), P(None, ("data", "tensor")))
    return annotate(jnp.tanh(hidden), P("data", None, "tensor"))


def layers(x, ws):
    def layer(x, w):
        x = annotate(x @ w, P(None, ("data", "tensor")))
        return annotate(jnp.tanh(x), P("data", None, "tensor")), None

    return lax.scan(layer, x, ws)[0]


def image_rows(images, kernel):
    out = lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=NHWC)
    return jnp.tanh(annotate(out, P(None, "tensor")))


def gradient(x, w):
    def loss(w):
        hidden = jnp.tanh(annotate(x @ w, P("data", None, "tensor")))
        return jnp.sum(annotate(hidden * 2, P(None, ("data", "tensor"))) ** 2)

    return jax.grad(loss)(w)


def branch(x, turned):
    def one(f):
        return lambda x: annotate(f(x), P(None, ("data", "tensor")))

    return lax.cond(turned, one(jnp.sin), one(jnp.cos), x)


def around_a_product(x, w):
    hidden = annotate(jnp.einsum("bsf,fg->bsg", x, w), P("data", None, "tensor"))
    left, right = annotate(hidden, P("tensor", "data")), annotate(hidden, P(None, ("data", "tensor")))
    return jnp.einsum("bsg,btg->bst", left, right)


def window(x):
    shifted = jnp.pad(jnp.sin(x), ((0, 0), (1, 1), (0, 0)))[:, :64]
    return annotate(shifted, P(None, ("tensor", "data")))


WIDE, SQUARE, CUBE = {"data": 2, "tensor": 4}, {"data": 4, "tensor": 2}, {"a": 2, "b": 2, "c": 2}
BY_ROW, BY_FEATURE = P("data", None, "tensor"), P(None, ("data", "tensor"))

PROGRAMS: dict[str, Program] = {
    "two axes onto one dim": Program(WIDE, reshard_to(BY_FEATURE), (floats(8, 64, 32),), (BY_ROW,)),
    "the same, data=4": Program(SQUARE, reshard_to(BY_FEATURE), (floats(8, 64, 32),), (BY_ROW,)),
    "axes the other way round": Program(
        WIDE, reshard_to(BY_FEATURE), (floats(8, 64, 32),), (P("tensor", None, "data"),)
    ),
    "another axis on another dim": Program(WIDE, reshard_to(P(None, "tensor")), (floats(64, 64),), (P("data"),)),
    "three dims onto one": Program(
        CUBE, reshard_to(P(None, None, ("a", "b", "c"))), (floats(16, 16, 64),), (P("a", "b", "c"),)
    ),
    "two of three axes": Program(CUBE, reshard_to(P(None, None, ("a", "b"))), (floats(16, 16, 64),), (P("a", "b"),)),
    "one of three axes for two": Program(CUBE, reshard_to(P(None, ("b", "c"))), (floats(64, 64),), (P("a"),)),
    "rows and columns merged": Program(WIDE, merged, (floats(8, 64, 32),), (P("data", "tensor"),)),
    "attention, heads to positions": Program(
        WIDE, heads_to_positions, (floats(8, 64, 8, 16),) * 3, (P("data", None, "tensor"),) * 3
    ),
    "attention, positions to heads": Program(WIDE, positions_to_heads, (floats(8, 64, 8, 16),), (P("data"),)),
    "experts and back": Program(
        WIDE, experts, (floats(8, 32, 16), floats(8, 16, 32)), (P("data"), P(("data", "tensor")))
    ),
    "layers in a loop": Program(WIDE, layers, (floats(8, 64, 32), floats(4, 32, 32)), (BY_ROW, None)),
    "a convolution's rows": Program(WIDE, image_rows, (floats(8, 32, 32, 16), floats(3, 3, 16, 16)), (P("data"), None)),
    "a gradient": Program(WIDE, gradient, (floats(8, 64, 32), floats(32, 32)), (P("data"), None)),
    "a branch": Program(WIDE, branch, (floats(8, 64, 32), jax.ShapeDtypeStruct((), "bool")), (BY_ROW, None)),
    "around a product": Program(WIDE, around_a_product, (floats(8, 64, 32), floats(32, 32)), (P("data"), None)),
    "a sliding window": Program(WIDE, window, (floats(8, 64, 32),), (P("tensor", None, "data"),)),
}


@dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """Communication of a compiled program."""

    bytes: int
    """Bytes of all collectives."""
    warned: bool
    """Whether the partitioner warned of full rematerialization."""


@contextmanager
def captured_stderr() -> Iterator[list[str]]:
    """Captures stderr of the process, C++ included; the list has its text after the block."""
    texts: list[str] = []
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield texts
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))


def compile_program(program: Program, engine: str) -> CompiledProgram:
    """Communication of a program with shardings inferred by an engine; `"xla"` leaves them to the partitioner."""
    with sharding.mesh(program.sizes), captured_stderr() as texts:
        jitted = sharding.jit(program.run, in_shardings=program.specs, engine=engine)
        facts = cost.read_compiled(jitted.lower(*program.args).compile())
    return CompiledProgram(bytes=facts.total_bytes, warned=WARNING in texts[0])


def predicted_bytes(program: Program) -> int:
    """Bytes of collectives on CPUs that the ledger predicts for the resharded program."""
    with sharding.mesh(program.sizes):
        completion = sharding.jit(program.run, in_shardings=program.specs).complete(*program.args)
        return completion.communication().lowered("cpu").total_bytes
