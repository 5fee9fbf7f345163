"""Divergent control flow in a `shard_map`: no collective-permute there, which waits for all devices."""

import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzz.case import options_text
from fuzz.check import namespace
from fuzz.generate import numbered
from jax import lax
from support import quick_compile

import sharding
from sharding import P, annotate, pipeline
from sharding.cost import read_compiled

SIZES = {"pipe": 2, "data": 2, "tensor": 2}
MATRIX = jax.ShapeDtypeStruct((8, 16), jnp.float32)
COLUMNS, ROWS = P(None, "tensor"), P("tensor", None)


def moved(before, after):
    """A reshard from one spec to another."""
    return lambda x: annotate(jnp.sin(annotate(x, before)), after)


def along(op):
    """An op along a dim that is sharded before and after it."""
    return lambda x: annotate(op(annotate(x, COLUMNS)), COLUMNS)


def convolved(x):
    shape = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x[..., None], jnp.ones((3, 1, 1)), (1,), "SAME", dimension_numbers=shape)[..., 0]


def pooled(x):
    return lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 1), "SAME")


def product(x):
    """A sum over an axis that the result is then sharded over, while another axis is idle."""
    return annotate(annotate(x, COLUMNS) @ annotate(jnp.cos(x.T @ x), ROWS), COLUMNS)


def scanned(x):
    return lax.scan(lambda c, _: (along(lambda h: jnp.roll(h, 1, 1))(c), None), x, length=2)[0]


def unequal(x):
    """Uneven shards."""
    return jnp.pad(moved(P("data", "tensor"), P("tensor", "data"))(x[:7, :13]), ((0, 1), (0, 3)))


BODIES = {
    "orders": moved(P(("data", "tensor")), P(("tensor", "data"))),
    "axes": moved(P("data"), P("tensor")),
    "dims": moved(P("data", "tensor"), P("tensor", "data")),
    "unequal": unequal,
    "product": product,
    "roll": along(lambda x: jnp.roll(x, 1, 1)),
    "flip": along(lambda x: x[:, ::-1]),
    "shift": along(lambda x: jnp.pad(x[:, :-1], ((0, 0), (1, 0)))),
    "halves": along(lambda x: jnp.concatenate([x[:, 8:], x[:, :8]], 1)),
    "convolution": along(convolved),
    "pool": along(pooled),
    "scan": scanned,
    "remat": jax.checkpoint(along(lambda x: jnp.roll(x, 3, 1))),
}


def in_turn(body):
    """Each device of the pipe runs the body as often as its index."""

    def loop(*args):
        def round_(i, _):
            return body(*(jnp.where(i < 0, jnp.zeros_like(a), a) for a in args))

        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(body, *args))
        return lax.fori_loop(0, lax.axis_index("pipe"), round_, nothing)

    return jax.shard_map(loop, in_specs=P(), out_specs=P(), axis_names={"pipe"}, check_vma=False)


def in_branch(body):
    """Only the first device of the pipe runs the body."""

    def branch(x):
        return lax.cond(lax.axis_index("pipe") == 0, body, jnp.sin, x)

    return jax.shard_map(branch, in_specs=P(), out_specs=P(), axis_names={"pipe"}, check_vma=False)


def permuted(compiled):
    """The collective-permutes that not all devices run equally often, as op and line."""
    found = [c for c in read_compiled(compiled).collectives if c.kind == "collective-permute"]
    return [(c.op_name, c.source) for c in found if c.is_conditional or not c.is_counted]


def square(body):
    return jax.value_and_grad(lambda x: jnp.square(body(x)).mean())


@pytest.mark.parametrize("around", [in_turn, pytest.param(in_branch, marks=pytest.mark.slow)], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.filterwarnings("ignore:.*XLA pads it")
def test_nothing_is_permuted(name, around):
    body = BODIES[name] if around is in_branch else square(BODIES[name])
    with sharding.mesh(SIZES):
        step = sharding.jit(around(body))
        assert permuted(step.lower(MATRIX).compile()) == []
        assert "collective-permute" not in step.complete(MATRIX).communication().by_kind()


def test_uniform_control_flow_still_permutes():
    with sharding.mesh(SIZES):
        step = sharding.jit(jax.shard_map(BODIES["axes"], in_specs=P(), out_specs=P(), axis_names={"pipe"}))
        assert [c.kind for c in step.complete(MATRIX).communication()] == ["collective-permute"]
        assert "collective-permute" in read_compiled(step.lower(MATRIX).compile()).by_kind()


def test_branch_on_a_pipe_of_one_device_still_permutes():
    with sharding.mesh(pipe=1, data=2, tensor=2, devices=jax.devices()[:4]):
        step = sharding.jit(in_branch(BODIES["axes"]))
        assert "collective-permute" in step.complete(MATRIX).communication().by_kind()


def stage_fn(w, x):
    """Reshards of all kinds, in an order in which each affects the result."""
    x = x + jnp.tanh(x @ w)
    for name in ("orders", "roll", "axes", "convolution", "dims"):
        x = BODIES[name](x) + x
    return x / 8


def loss_fn(y, target):
    return jnp.square(y - target).mean()


def numbers(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


def run():
    """A pipeline on eight devices and a loop on one: prints the relative difference of loss and gradients."""
    w, x, target = numbers(2, 16, 16) / 4, numbers(3, 8, 16), numbers(3, 8, 16)
    schedule = pipeline.schedules.one_f_one_b(stages=2, microbatches=3)
    with sharding.mesh(SIZES):
        step = sharding.jit(pipeline.value_and_grad(stage_fn, loss_fn, schedule))
        found = jax.tree.map(np.asarray, jax.block_until_ready(step(w, x, target)))

    def mean_loss(w):
        return sum(loss_fn(stage_fn(w[1], stage_fn(w[0], x[m])), target[m]) for m in range(3)) / 3

    with sharding.mesh(pipe=1, data=1, tensor=1, devices=jax.devices()[:1]):
        expected = jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(mean_loss))(w))
    print(max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, expected, strict=True)))


def test_pipeline_with_all_reshards_has_the_results_of_one_device():
    """In a separate process, since a deadlock would never end."""
    code = "import conftest, annotations.test_divergent_control_flow as test; test.run()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(os.path.dirname(__file__)), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100, 20))
@pytest.mark.filterwarnings("ignore:.*XLA pads it")
def test_random_programs_are_not_permuted(first):
    """Random programs on two or four devices, in a loop with different trip counts on two groups."""
    rejected = []
    for number in range(first, first + 20):
        case = numbered("divergence", number)
        names, size = namespace(case, False), math.prod(n for _, n in case.mesh)
        args, program = names["arguments"](), names["make"](sharding.annotate, jax.jit)
        sizes = {"pipe": 2, **(dict(case.mesh) if size <= 4 else {})}
        with sharding.mesh(sizes, devices=jax.devices()[: math.prod(sizes.values())]):
            if size not in (2, 4):
                continue
            if is_rejected(case, names["make"](names["plain"], jax.jit), args):
                rejected.append(number)
                continue
            if any(map(is_key, jax.tree.leaves((args, jax.eval_shape(program, *args))))):
                continue
            names["mesh"] = names["current_mesh"]()
            asked = eval(f"dict({options_text(case)})", names)
            asked.pop("donate_argnums", None)
            found = permuted(sharding.jit(in_turn(program), **asked).lower(*args).compile(quick_compile.OPTIONS))
            assert found == [], number
    assert len(rejected) <= 8
    jax.clear_caches()


def is_rejected(case, program, args):
    """Whether JAX rejects a program in such a loop: callbacks, foreign functions and the host's memory there."""
    try:
        text = f"{options_text(case)} {jax.make_jaxpr(program)(*args)}"
    except (NotImplementedError, TypeError, ValueError):
        return True
    return any(word in text for word in ("callback", "debug_print", "custom_partitioning", "ffi_call", "host"))


def is_key(x):
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.extended)
