"""Small programs with one bad annotation each: the ledger says what it costs, on which line, and what to write instead.

In each program the line where the collective is ends in `# moves` and the annotation at fault in `# asked`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sharding
from sharding import P, ShardingError, annotate

MESH = {"data": 2, "tensor": 4}
NHWC = ("NHWC", "HWIO", "NHWC")


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A program that takes an annotation, first a bad one and then a good one."""

    program: Callable[..., Callable[..., Any]]
    bad: P
    good: P
    args: tuple[Any, ...]
    specs: tuple[Any, ...] = ()
    """Of the arguments, in both."""
    is_result: bool = False
    """Whether the annotation is that of the result."""
    kind: str
    """Of the largest collective."""
    axes: tuple[str, ...]
    count: int = 1
    bytes: int
    cause: str
    """Part of it."""
    hint: str
    """Part of it."""


def line(program, mark):
    """`test_bad_annotations.py:N` of the one line of a program that ends in a mark."""
    lines, first = inspect.getsourcelines(program)
    (found,) = [first + k for k, text in enumerate(lines) if text.rstrip().endswith(mark)]
    return f"test_bad_annotations.py:{found} "


def weight(spec):
    def f(x, w):
        w = annotate(w, spec)  # asked
        h = x @ w  # moves
        return jax.nn.relu(h)

    return f


def activation(spec):
    def f(x, w1, w2):
        h = jax.nn.relu(x @ w1)  # moves
        h = annotate(h, spec, name="hidden")  # asked
        return h @ w2

    return f


def turned(spec):
    def f(x):
        x = jnp.sin(x)  # moves
        x = annotate(x, spec, name="turned")  # asked
        return jnp.cos(x)

    return f


def contracted(spec):
    def f(x, w):
        x = annotate(x, spec)  # asked
        return x @ w  # moves

    return f


def consecutive(spec):
    def f(x):
        first = annotate(jnp.tanh(x), P("tensor"), name="first")
        second = jnp.exp(first)  # moves
        second = annotate(second, spec, name="second")  # asked
        return second * 2

    return f


def running(spec):
    def f(x):
        y = annotate(x * 2, spec, name="y")  # asked
        return jnp.cumsum(y, axis=1)  # moves

    return f


def ordered(spec):
    def f(x):
        y = annotate(x * 2, spec, name="y")  # asked
        return jnp.sort(y, axis=1)  # moves

    return f


def waves(spec):
    def f(x):
        y = annotate(x * 2, spec, name="y")  # asked
        return jnp.fft.fft(y, axis=1)  # moves

    return f


def looked_up(spec):
    def f(table, tokens):
        table = annotate(table, spec)  # asked
        return table[tokens]  # moves

    return f


def reshaped(spec):
    def f(x):
        y = annotate(x + 1, spec, name="y")  # asked
        y = y.reshape(-1, 3, 20)  # moves
        return y * 2

    return f


def layers(spec):
    def f(x, ws):
        def layer(x, w):
            w = annotate(w, spec, name="layer")  # asked
            return jnp.tanh(x @ w), None  # moves

        return lax.scan(layer, annotate(x, P("data")), ws)[0]

    return f


def adam(spec):
    def f(w, mu, gradient):
        mu = annotate(mu, spec)  # asked
        mu = 0.9 * mu + 0.1 * gradient  # moves
        return w - 1e-3 * mu, mu

    return f


def returned(spec):
    def f(x, w):
        return x @ w  # moves

    return f


def scaled(spec):
    def f(x):
        y = annotate(x * 2, spec, name="y")  # asked
        return y / jnp.max(y, axis=-1, keepdims=True)  # moves

    return f


def side_by_side(spec):
    def f(x, y):
        y = annotate(y, spec)  # asked
        both = jnp.concatenate([x, y], axis=1)  # moves
        return jnp.tanh(both)

    return f


def channels(spec):
    def f(images, kernel):
        images = annotate(images, spec)  # asked
        return lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=NHWC)  # moves

    return f


def attention(spec):
    def f(q, k):
        k = annotate(k, spec)  # asked
        scores = jnp.einsum("bshd,bthd->bhst", q, k)  # moves
        return jax.nn.relu(scores)

    return f


X, W = floats(4096, 256), floats(256, 512)
WHOLE = 4 * 4096 * 512
TO_ROWS = "goes from [-, tensor] to [tensor, -]"

MISTAKES: dict[str, Mistake] = {
    "a weight is gathered": Mistake(
        program=weight, bad=P("data"), good=P(None, "tensor"), args=(X, W), specs=(P("data"), None),
        kind="all-gather", axes=("data",), bytes=4 * 256 * 512,
        cause="w, goes from [data, -] to [-, -]", hint="or take data off dim 0 of x (in_shardings)",
    ),
    "an activation is made whole": Mistake(
        program=activation, bad=P(), good=P("data"), args=(X, W, floats(512, 64)), specs=(P("data"), None, None),
        kind="all-gather", axes=("data",), bytes=WHOLE,
        cause="hidden, goes from [data, -] to [-, -]", hint="annotate hidden as [data, -] (it is [-, -] by annotate",
    ),
    "XLA alone would rematerialize the whole": Mistake(
        program=turned, bad=P(None, ("data", "tensor")), good=P("data", None, "tensor"),
        args=(floats(8, 64, 32),), specs=(P("data", None, "tensor"),),
        kind="all-to-all", axes=("data",), bytes=4 * 8 * 64 * 32 // 8,
        cause="goes from [data, -, tensor] to [-, data, tensor]", hint="take data, tensor off dim 1 of turned",
    ),
    "the batch's axis on a contracted dim": Mistake(
        program=contracted, bad=P(None, "data"), good=P("data"), args=(X, W), specs=(),
        kind="all-reduce", axes=("data",), bytes=WHOLE,
        cause="dot_general sums over a dim that data splits", hint="take data off dim 1 of x (annotate",
    ),
    "two ops in a row want other splits": Mistake(
        program=consecutive, bad=P(None, "tensor"), good=P("tensor"), args=(X,),
        kind="all-to-all", axes=("tensor",), bytes=4 * 4096 * 256 // 4,
        cause="first, goes from [tensor, -] to [-, tensor]", hint="take tensor off dim 1 of second (annotate",
    ),
    "a running sum along a split dim": Mistake(
        program=running, bad=P(None, "tensor"), good=P("tensor"), args=(X,),
        kind="all-to-all", axes=("tensor",), bytes=4 * 4096 * 256 // 4,
        cause=f"operand 0 of cumsum, y, {TO_ROWS}", hint="cumsum has dim 1 of it whole",
    ),
    "a sorted dim is split": Mistake(
        program=ordered, bad=P(None, "tensor"), good=P("tensor"), args=(X,),
        kind="all-to-all", axes=("tensor",), bytes=4 * 4096 * 256 // 4,
        cause=f"operand 0 of sort, y, {TO_ROWS}", hint="sort has dim 1 of it whole",
    ),
    "a Fourier transform along a split dim": Mistake(
        program=waves, bad=P(None, "tensor"), good=P("tensor"), args=(X,),
        kind="all-gather", axes=("tensor",), bytes=8 * 4096 * 256,
        cause="goes from [-, tensor] to [-, -]", hint="fft has dim 1 of it whole",
    ),
    "lookups in a table of split rows": Mistake(
        program=looked_up, bad=P("tensor"), good=P(None, "tensor"),
        args=(floats(512, 64), jax.ShapeDtypeStruct((16, 32), "int32")), specs=(None, P("data")),
        kind="all-reduce", axes=("tensor",), bytes=4 * 8 * 32 * 64,
        cause="gather sums over a dim that tensor splits", hint="take tensor off dim 0 of table (annotate",
    ),
    "a reshape breaks a split": Mistake(
        program=reshaped, bad=P(None, "tensor"), good=P("tensor"), args=(floats(64, 60),),
        kind="all-gather", axes=("tensor",), bytes=4 * 64 * 60,
        cause="operand 0 of reshape, y, goes from [-, tensor] to [-, -]", hint="reshape has dim 1 of it whole",
    ),
    "a loop gathers each turn": Mistake(
        program=layers, bad=P("data"), good=P(), args=(X, floats(6, 256, 256)),
        kind="all-gather", axes=("data",), count=6, bytes=6 * 4 * 256 * 256,
        cause="layer, goes from [data, -] to [-, -]", hint="annotate layer as [-, -] (it is [data, -] by annotate",
    ),
    "optimizer state lies otherwise than its parameter": Mistake(
        program=adam, bad=P(None, "tensor"), good=P("tensor"), args=(W, W, W), specs=(P("tensor"), None, P("tensor")),
        kind="all-to-all", axes=("tensor",), bytes=4 * 256 * 512 // 4,
        cause="operand 1 of add, float32[256, 512], goes from [tensor, -] to [-, tensor]", hint="by in_shardings",
    ),
    "a result is asked whole": Mistake(
        program=returned, bad=P(), good=P("data"), args=(X, W), specs=(P("data"), None), is_result=True,
        kind="all-gather", axes=("data",), bytes=WHOLE,
        cause="out, a result, goes from [data, -] to [-, -]", hint="annotate out as [data, -] (it is [-, -] by out_sh",
    ),
    "a maximum over a split dim": Mistake(
        program=scaled, bad=P(None, "tensor"), good=P("tensor"), args=(X,),
        kind="all-reduce", axes=("tensor",), bytes=4 * 4096,
        cause="reduce_max sums over a dim that tensor splits", hint="take tensor off dim 1 of y (annotate",
    ),
    "parts of a split dim are joined": Mistake(
        program=side_by_side, bad=P(None, "tensor"), good=P("tensor"), args=(X, X),
        kind="all-to-all", axes=("tensor",), bytes=WHOLE // 4,
        cause="result of concatenate, float32[4096, 512], goes", hint="of concatenate at test_bad_annotations.py",
    ),
    "channels of images are split": Mistake(
        program=channels, bad=P(None, None, None, "tensor"), good=P("tensor"),
        args=(floats(8, 32, 32, 16), floats(3, 3, 16, 16)),
        kind="all-reduce", axes=("tensor",), bytes=4 * 8 * 32 * 32 * 16,
        cause="conv_general_dilated sums over a dim", hint="take tensor off dim 3 of images (annotate",
    ),
    "keys lie otherwise than queries": Mistake(
        program=attention, bad=P("data", "tensor"), good=P("data", None, "tensor"),
        args=(floats(4, 64, 8, 16), floats(4, 64, 8, 16)), specs=(P("data", None, "tensor"), None),
        kind="all-to-all", axes=("tensor",), bytes=4 * 4 * 64 * 8 * 16 // 8,
        cause="k, goes from [data, tensor, -, -] to [data, -, tensor, -]", hint="take tensor off dim 2 of q (in_shar",
    ),
}  # fmt: skip


def jitted(m, spec, **options):
    options |= {"out_shardings": spec} if m.is_result else {}
    return sharding.jit(m.program(spec), in_shardings=m.specs or None, **options)


@pytest.mark.parametrize("name", MISTAKES)
def test_the_line_is_named(name):
    m = MISTAKES[name]
    with sharding.mesh(MESH, devices=8):
        bad = jitted(m, m.bad).complete(*m.args).communication()
        good = jitted(m, m.good).complete(*m.args).communication()
    largest = max(bad, key=lambda c: c.bytes)
    assert (largest.kind, largest.axes, largest.count, largest.bytes) == (m.kind, m.axes, m.count, m.bytes)
    assert largest.source.startswith(line(m.program, "# moves"))
    assert m.cause in largest.cause and m.hint in largest.hint
    assert ("out_shardings" if m.is_result else line(m.program, "# asked")) in largest.hint
    assert not good


@pytest.mark.parametrize("name", [name for name, m in MISTAKES.items() if m.kind == "all-gather"])
def test_gathers_are_refused_with_their_line(name):
    m = MISTAKES[name]
    limit = m.bytes // m.count - 1
    with sharding.mesh(MESH, devices=8):
        with pytest.raises(ShardingError, match="no array is gathered unasked") as caught:
            jitted(m, m.bad, max_implicit_bytes=limit).complete(*m.args)
        assert line(m.program, "# moves") in str(caught.value)
        assert ("out_shardings" if m.is_result else line(m.program, "# asked")) in str(caught.value)
        jitted(m, m.good, max_implicit_bytes=0).complete(*m.args)


def compiled(name):
    """Of both programs what was predicted beside what they are compiled to."""
    m = MISTAKES[name]
    with sharding.mesh(MESH):
        both = [jitted(m, spec) for spec in (m.bad, m.good)]
        return [j.complete(*m.args).verify(j.lower(*m.args).compile()) for j in both]


def test_the_compiled_program_has_what_is_said():
    bad, good = compiled("XLA alone would rematerialize the whole")
    assert bad.agrees and bad.predicted == {"all-to-all": (2, 2 * 8192)}
    assert good.agrees and not good.compiled


NEWEST = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="XLA of JAX 0.10.2 gathers whatever a Fourier transform takes"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=NEWEST if "Fourier" in n else ()) for n in MISTAKES])
def test_the_compiled_programs_have_what_is_said(name):
    bad, good = compiled(name)
    assert bad.agrees and bad.compiled, bad
    assert good.agrees and not good.compiled, good


def test_an_axis_that_does_not_divide_a_dim():
    def f(x):
        y = annotate(x * 2, P("tensor"), name="y")  # asked
        return y + 1

    at = line(f, "# asked")
    with sharding.mesh(MESH, devices=8), pytest.warns(UserWarning, match="6 = 1 x 4 . 2.*64 bytes more") as warned:
        sharding.jit(f).complete(floats(6, 8))
        with pytest.raises(ShardingError, match="divide the dim") as caught:
            sharding.jit(f, strict=True).complete(floats(6, 8))
    assert at in str(caught.value)
    assert {f"test_bad_annotations.py:{w.lineno} " for w in warned} == {at}


def test_an_annotation_that_another_one_overrules():
    def f(x, w):
        x = annotate(x, P("data", None))
        w = annotate(w, P(None, "data"))  # asked
        return x @ w

    with sharding.mesh(MESH, devices=8):
        conflicts = sharding.jit(f).complete(X, W).conflicts
    assert any(line(f, "# asked") in c.lost.origin for c in conflicts)


def test_running_sums_are_right():
    x = np.random.default_rng(0).normal(size=(16, 24)).astype("float32")
    with sharding.mesh(MESH):
        for f in (jnp.cumsum, jnp.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp):
            step = sharding.jit(lambda x, f=f: f(x * 1.5, 1), in_shardings=P("data", "tensor"))
            np.testing.assert_allclose(jax.block_until_ready(step(x)), f(x * 1.5, 1), rtol=1e-5, atol=1e-6)
