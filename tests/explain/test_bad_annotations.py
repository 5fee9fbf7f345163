"""Small programs with one bad annotation each: the ledger gives its cost, its line and what to write instead.

In each program the line that causes the collective ends in `# moves`, and the annotation at fault in `# annotated`.
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
    """A program with a bad annotation, and the good one that avoids the collective."""

    program: Callable[..., Callable[..., Any]]
    bad: P
    good: P
    args: tuple[Any, ...]
    specs: tuple[Any, ...] = ()
    """Specs of the arguments, with either annotation."""
    is_result: bool = False
    """Whether the result is annotated."""
    kind: str
    """Kind of the largest collective."""
    axes: tuple[str, ...]
    count: int = 1
    bytes: int
    cause: str
    """A substring of the cause."""
    hint: str
    """A substring of the hint."""


def line(program, mark):
    """`test_bad_annotations.py:N` of the one line of a program that ends in a mark."""
    lines, first = inspect.getsourcelines(program)
    (found,) = [first + k for k, text in enumerate(lines) if text.rstrip().endswith(mark)]
    return f"test_bad_annotations.py:{found} "


def weight(spec):
    def f(x, w):
        w = annotate(w, spec)  # annotated
        h = x @ w  # moves
        return jax.nn.relu(h)

    return f


def activation(spec):
    def f(x, w1, w2):
        h = jax.nn.relu(x @ w1)  # moves
        h = annotate(h, spec, name="hidden")  # annotated
        return h @ w2

    return f


def transposed_shards(spec):
    def f(x):
        x = jnp.sin(x)  # moves
        x = annotate(x, spec, name="moved")  # annotated
        return jnp.cos(x)

    return f


def contracted(spec):
    def f(x, w):
        x = annotate(x, spec)  # annotated
        return x @ w  # moves

    return f


def consecutive(spec):
    def f(x):
        first = annotate(jnp.tanh(x), P("tensor"), name="first")
        second = jnp.exp(first)  # moves
        second = annotate(second, spec, name="second")  # annotated
        return second * 2

    return f


def running(spec):
    def f(x):
        y = annotate(x * 2, spec, name="y")  # annotated
        return jnp.cumsum(y, axis=1)  # moves

    return f


def ordered(spec):
    def f(x):
        y = annotate(x * 2, spec, name="y")  # annotated
        return jnp.sort(y, axis=1)  # moves

    return f


def waves(spec):
    def f(x):
        y = annotate(x * 2, spec, name="y")  # annotated
        return jnp.fft.fft(y, axis=1)  # moves

    return f


def looked_up(spec):
    def f(table, tokens):
        table = annotate(table, spec)  # annotated
        return table[tokens]  # moves

    return f


def reshaped(spec):
    def f(x):
        y = annotate(x + 1, spec, name="y")  # annotated
        y = y.reshape(-1, 3, 20)  # moves
        return y * 2

    return f


def layers(spec):
    def f(x, ws):
        def layer(x, w):
            w = annotate(w, spec, name="layer")  # annotated
            return jnp.tanh(x @ w), None  # moves

        return lax.scan(layer, annotate(x, P("data")), ws)[0]

    return f


def adam(spec):
    def f(w, mu, gradient):
        mu = annotate(mu, spec)  # annotated
        mu = 0.9 * mu + 0.1 * gradient  # moves
        return w - 1e-3 * mu, mu

    return f


def returned(spec):
    def f(x, w):
        return x @ w  # moves

    return f


def scaled(spec):
    def f(x):
        y = annotate(x * 2, spec, name="y")  # annotated
        return y / jnp.max(y, axis=-1, keepdims=True)  # moves

    return f


def side_by_side(spec):
    def f(x, y):
        y = annotate(y, spec)  # annotated
        both = jnp.concatenate([x, y], axis=1)  # moves
        return jnp.tanh(both)

    return f


def channels(spec):
    def f(images, kernel):
        images = annotate(images, spec)  # annotated
        return lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=NHWC)  # moves

    return f


def attention(spec):
    def f(q, k):
        k = annotate(k, spec)  # annotated
        scores = jnp.einsum("bshd,bthd->bhst", q, k)  # moves
        return jax.nn.relu(scores)

    return f


X, W = floats(4096, 256), floats(256, 512)
HIDDEN_BYTES = 4 * 4096 * 512
TO_ROWS = "resharded from [-, tensor] to [tensor, -]"

MISTAKES: dict[str, Mistake] = {
    "a weight is all-gathered": Mistake(
        program=weight, bad=P("data"), good=P(None, "tensor"), args=(X, W), specs=(P("data"), None),
        kind="all-gather", axes=("data",), bytes=4 * 256 * 512,
        cause="w, resharded from [data, -] to [-, -]", hint="or remove data from dim 0 of x (in_shardings)",
    ),
    "an activation is all-gathered": Mistake(
        program=activation, bad=P(), good=P("data"), args=(X, W, floats(512, 64)), specs=(P("data"), None, None),
        kind="all-gather", axes=("data",), bytes=HIDDEN_BYTES,
        cause="hidden, resharded from [data, -] to [-, -]",
        hint="annotate hidden as [data, -] (now [-, -] from annotate",
    ),
    "XLA would rematerialize in full": Mistake(
        program=transposed_shards, bad=P(None, ("data", "tensor")), good=P("data", None, "tensor"),
        args=(floats(8, 64, 32),), specs=(P("data", None, "tensor"),),
        kind="all-to-all", axes=("data",), bytes=4 * 8 * 64 * 32 // 8,
        cause="resharded from [data, -, tensor] to [-, data, tensor]", hint="remove data, tensor from dim 1 of moved",
    ),
    "the batch axis on a contracted dim": Mistake(
        program=contracted, bad=P(None, "data"), good=P("data"), args=(X, W), specs=(),
        kind="all-reduce", axes=("data",), bytes=HIDDEN_BYTES,
        cause="dot_general contracts a dim sharded over data", hint="remove data from dim 1 of x (annotate",
    ),
    "two consecutive ops are sharded differently": Mistake(
        program=consecutive, bad=P(None, "tensor"), good=P("tensor"), args=(X,),
        kind="all-to-all", axes=("tensor",), bytes=4 * 4096 * 256 // 4,
        cause="first, resharded from [tensor, -] to [-, tensor]", hint="remove tensor from dim 1 of second (annotate",
    ),
    "a cumulative sum along a sharded dim": Mistake(
        program=running, bad=P(None, "tensor"), good=P("tensor"), args=(X,),
        kind="all-to-all", axes=("tensor",), bytes=4 * 4096 * 256 // 4,
        cause=f"operand 0 of cumsum, y, {TO_ROWS}", hint="cumsum needs its dim 1 replicated",
    ),
    "a sort along a sharded dim": Mistake(
        program=ordered, bad=P(None, "tensor"), good=P("tensor"), args=(X,),
        kind="all-to-all", axes=("tensor",), bytes=4 * 4096 * 256 // 4,
        cause=f"operand 0 of sort, y, {TO_ROWS}", hint="sort needs its dim 1 replicated",
    ),
    "a Fourier transform along a sharded dim": Mistake(
        program=waves, bad=P(None, "tensor"), good=P("tensor"), args=(X,),
        kind="all-gather", axes=("tensor",), bytes=4 * 4096 * 256,
        cause="resharded from [-, tensor] to [-, -]", hint="fft needs its dim 1 replicated",
    ),
    "lookups in a row-sharded table": Mistake(
        program=looked_up, bad=P("tensor"), good=P(None, "tensor"),
        args=(floats(512, 64), jax.ShapeDtypeStruct((16, 32), "int32")), specs=(None, P("data")),
        kind="all-reduce", axes=("tensor",), bytes=4 * 8 * 32 * 64,
        cause="gather reduces a dim sharded over tensor", hint="remove tensor from dim 0 of table (annotate",
    ),
    "a reshape of a sharded dim": Mistake(
        program=reshaped, bad=P(None, "tensor"), good=P("tensor"), args=(floats(64, 60),),
        kind="all-gather", axes=("tensor",), bytes=4 * 64 * 60,
        cause="operand 0 of reshape, y, resharded from [-, tensor] to [-, -]",
        hint="reshape needs its dim 1 replicated",
    ),
    "a loop all-gathers in each iteration": Mistake(
        program=layers, bad=P("data"), good=P(), args=(X, floats(6, 256, 256)),
        kind="all-gather", axes=("data",), count=6, bytes=6 * 4 * 256 * 256,
        cause="layer, resharded from [data, -] to [-, -]", hint="annotate layer as [-, -] (now [data, -] from annotate",
    ),
    "optimizer state sharded differently from its parameter": Mistake(
        program=adam, bad=P(None, "tensor"), good=P("tensor"), args=(W, W, W), specs=(P("tensor"), None, P("tensor")),
        kind="all-to-all", axes=("tensor",), bytes=4 * 256 * 512 // 4,
        cause="operand 1 of add, float32[256, 512], resharded from [tensor, -] to [-, tensor]",
        hint="from in_shardings",
    ),
    "a replicated result": Mistake(
        program=returned, bad=P(), good=P("data"), args=(X, W), specs=(P("data"), None), is_result=True,
        kind="all-gather", axes=("data",), bytes=HIDDEN_BYTES,
        cause="out, an output, resharded from [data, -] to [-, -]",
        hint="annotate out as [data, -] (now [-, -] from out_sh",
    ),
    "a maximum over a sharded dim": Mistake(
        program=scaled, bad=P(None, "tensor"), good=P("tensor"), args=(X,),
        kind="all-reduce", axes=("tensor",), bytes=4 * 4096,
        cause="reduce_max reduces a dim sharded over tensor", hint="remove tensor from dim 1 of y (annotate",
    ),
    "a concatenation along a sharded dim": Mistake(
        program=side_by_side, bad=P(None, "tensor"), good=P("tensor"), args=(X, X),
        kind="all-to-all", axes=("tensor",), bytes=HIDDEN_BYTES // 4,
        cause="result of concatenate, float32[4096, 512], resharded", hint="of concatenate at test_bad_annotations.py",
    ),
    "sharded channels of a convolution": Mistake(
        program=channels, bad=P(None, None, None, "tensor"), good=P("tensor"),
        args=(floats(8, 32, 32, 16), floats(3, 3, 16, 16)),
        kind="all-reduce", axes=("tensor",), bytes=4 * 8 * 32 * 32 * 16,
        cause="conv_general_dilated contracts a dim", hint="remove tensor from dim 3 of images (annotate",
    ),
    "keys sharded differently from queries": Mistake(
        program=attention, bad=P("data", "tensor"), good=P("data", None, "tensor"),
        args=(floats(4, 64, 8, 16), floats(4, 64, 8, 16)), specs=(P("data", None, "tensor"), None),
        kind="all-to-all", axes=("tensor",), bytes=4 * 4 * 64 * 8 * 16 // 8,
        cause="k, resharded from [data, tensor, -, -] to [data, -, tensor, -]",
        hint="remove tensor from dim 2 of q (in_shar",
    ),
}  # fmt: skip


def jitted(m, spec, **options):
    options |= {"out_shardings": spec} if m.is_result else {}
    return sharding.jit(m.program(spec), in_shardings=m.specs or None, **options)


@pytest.mark.parametrize("name", MISTAKES)
def test_the_hint_names_the_line(name):
    m = MISTAKES[name]
    with sharding.mesh(MESH, devices=8):
        bad = jitted(m, m.bad).complete(*m.args).communication()
        good = jitted(m, m.good).complete(*m.args).communication()
    largest = max(bad, key=lambda c: c.bytes)
    assert (largest.kind, largest.axes, largest.count, largest.bytes) == (m.kind, m.axes, m.count, m.bytes)
    assert largest.source.startswith(line(m.program, "# moves"))
    assert m.cause in largest.cause and m.hint in largest.hint
    assert ("out_shardings" if m.is_result else line(m.program, "# annotated")) in largest.hint
    assert not good


@pytest.mark.parametrize("name", [name for name, m in MISTAKES.items() if m.kind == "all-gather"])
def test_implicit_all_gathers_are_refused_with_their_line(name):
    m = MISTAKES[name]
    limit = m.bytes // m.count - 1
    with sharding.mesh(MESH, devices=8):
        with pytest.raises(ShardingError, match="implicit all-gathers of at most") as caught:
            jitted(m, m.bad, max_implicit_bytes=limit).complete(*m.args)
        assert line(m.program, "# moves") in str(caught.value)
        assert ("out_shardings" if m.is_result else line(m.program, "# annotated")) in str(caught.value)
        jitted(m, m.good, max_implicit_bytes=0).complete(*m.args)


def compiled(name):
    """The verifications of both programs, compiled."""
    m = MISTAKES[name]
    with sharding.mesh(MESH):
        both = [jitted(m, spec) for spec in (m.bad, m.good)]
        return [j.complete(*m.args).verify(j.lower(*m.args).compile()) for j in both]


def test_the_compiled_program_matches_the_prediction():
    bad, good = compiled("XLA would rematerialize in full")
    assert bad.agrees and bad.predicted == {"all-to-all": (2, 2 * 8192)}
    assert good.agrees and not good.compiled


NEWEST = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="XLA of JAX 0.10.2 all-gathers every operand of a Fourier transform"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=NEWEST if "Fourier" in n else ()) for n in MISTAKES])
def test_the_compiled_programs_match_the_prediction(name):
    bad, good = compiled(name)
    assert bad.agrees and bad.compiled, bad
    assert good.agrees and not good.compiled, good


def test_an_axis_that_does_not_divide_a_dim():
    def f(x):
        y = annotate(x * 2, P("tensor"), name="y")  # annotated
        return y + 1

    at = line(f, "# annotated")
    with sharding.mesh(MESH, devices=8), pytest.warns(UserWarning, match="6 = 1 x 4 . 2.*64 bytes more") as warned:
        sharding.jit(f).complete(floats(6, 8))
        with pytest.raises(
            ShardingError, match="dims divisible by the product of their axis sizes, under strict=True"
        ) as caught:
            sharding.jit(f, strict=True).complete(floats(6, 8))
    assert at in str(caught.value)
    assert {f"test_bad_annotations.py:{w.lineno} " for w in warned} == {at}


def test_an_annotation_that_loses_a_conflict():
    def f(x, w):
        x = annotate(x, P("data", None))
        w = annotate(w, P(None, "data"))  # annotated
        return x @ w

    with sharding.mesh(MESH, devices=8):
        conflicts = sharding.jit(f).complete(X, W).conflicts
    assert any(line(f, "# annotated") in c.lost.origin for c in conflicts)


def test_cumulative_ops_are_correct():
    x = np.random.default_rng(0).normal(size=(16, 24)).astype("float32")
    with sharding.mesh(MESH):
        for f in (jnp.cumsum, jnp.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp):
            step = sharding.jit(lambda x, f=f: f(x * 1.5, 1), in_shardings=P("data", "tensor"))
            np.testing.assert_allclose(jax.block_until_ready(step(x)), f(x * 1.5, 1), rtol=1e-5, atol=1e-6)
