"""Loops and branches as a device runs them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support import compilers, peak_memory

import sharding
from sharding import P, annotate
from sharding.memory import usage
from sharding.memory.compiler_traits import TRAITS
from sharding.memory.device_program import lower
from sharding.memory.instruction import all_instructions

MATRIX = jax.ShapeDtypeStruct((8, 16), jnp.float32)
FLOATS = peak_memory.floats(1024, 512)


def rounds(number):
    """A loop in the devices of a pipe, with a reshard over the other axes in each round."""

    def loop(x):
        return lax.fori_loop(0, number(), lambda _, x: annotate(jnp.sin(annotate(x, P("data"))), P("tensor")), x)

    return jax.shard_map(loop, in_specs=P(), out_specs=P(), axis_names={"pipe"}, check_vma=False)


@pytest.mark.parametrize("platform", TRAITS)
@pytest.mark.parametrize(
    ("number", "kind"),
    [(lambda: 3, "collective-permute"), (lambda: lax.axis_index("pipe"), "all-gather")],
    ids=["all devices", "some devices"],
)
def test_a_loop_permutes_only_where_all_devices_run_it(number, kind, platform):
    with sharding.mesh(pipe=2, data=2, tensor=2):
        assignment = sharding.jit(rounds(number)).complete(MATRIX).assignment
    kinds = {"all-gather", "all-to-all", "collective-permute"}
    found = {one.name for one in all_instructions(lower(assignment, TRAITS[platform]).body)}
    assert found & kinds == {kind}


def scanned(x, n):
    return lax.scan(lambda c, w: (jnp.tanh(c * w + n), c.sum(axis=1)), x, jnp.arange(3.0))


def over_columns(x, n):
    return lax.scan(lambda c, column: (c * n + column, None), x[:, 0], x.T)[0]


def repeated(x, n):
    return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(c[1]) + x), (0.0, x))


def branched(x, n):
    return lax.cond(n > 0, lambda x: jnp.sin(x) + jnp.flip(x, 1), lambda x: x[:, ::-1], x)


def solved(x, n):
    def solve(_, y):
        return jnp.cumsum(jnp.tanh(y * n), axis=1) * x

    return lax.custom_linear_solve(lambda v: v * n, x, solve, transpose_solve=solve)


@pytest.mark.parametrize("options", [{"symmetric": True}, {}, {"transpose_solve": lambda vecmat, y: vecmat(y)}])
def test_a_linear_solve_takes_what_its_solve_function_does(options):
    def solve(_, y):
        return jnp.cumsum(y * 2, axis=0)

    def by_solver(w, x):
        matrix = w * 3.0  # which the solution does not need
        return lax.custom_linear_solve(lambda v: matrix @ v, x, lambda _, y: solve(_, y) * w[:, 0], **options)

    def directly(w, x):
        return solve(None, x) * w[:, 0]

    def instructions(f):
        args = jax.ShapeDtypeStruct((32, 32), jnp.float32), jax.ShapeDtypeStruct((32,), jnp.float32)
        with sharding.mesh(data=1, devices=jax.devices()[:1]):
            body = lower(sharding.jit(f).complete(*args).assignment, TRAITS["gpu"]).body
        return [(one.name, one.shape, [x.shape for x in one.operands]) for one in body.live_instructions()]

    assert instructions(by_solver) == instructions(directly)


def mapped(x, n):
    return jax.shard_map(
        lambda x, n: jnp.sort(x * n, axis=1), in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"}
    )(x, n)


def mapped_twice(x, n):
    def inner(x):
        return jax.shard_map(jnp.exp, in_specs=P(), out_specs=P(), axis_names={"one"})(x * 2)

    return jax.shard_map(inner, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})(x) * n


@pytest.mark.parametrize("platform", TRAITS)
@pytest.mark.parametrize(
    "f", [scanned, over_columns, repeated, branched, solved, mapped, mapped_twice], ids=lambda f: f.__name__
)
def test_a_program_on_a_sharded_batch_is_that_of_a_share_of_it(f, platform):
    def instructions(rows, devices):
        args = jax.ShapeDtypeStruct((rows, 16), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
        with sharding.mesh(data=devices, one=1, devices=jax.devices()[:devices]):
            assignment = sharding.jit(f, in_shardings=(P("data"), None)).complete(*args).assignment
        body = lower(assignment, TRAITS[platform]).body
        return [(one.name, one.role, one.shape, one.num_bytes, len(one.operands)) for one in all_instructions(body)]

    assert instructions(64, 8) == instructions(8, 1)


def stages(x):
    """A solver's stages: each reads the results of those before, and the first carry is only written."""

    def one(carry):
        k, _, rows = carry
        y = x + jnp.einsum("s,sij->ij", jnp.arange(4.0) + k, rows)
        return k + 1, y, rows.at[k].set(jnp.sin(y) * y)

    return lax.while_loop(lambda c: c[0] < 4, one, (0, x, jnp.zeros((4, *x.shape))))[1]


def advanced(x):
    """A state that is donated, and updated in place."""
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1]) * c[0]), (0, x))[1][None][0]


@peak_memory.newest_jax_only
@pytest.mark.parametrize("f", [stages, advanced])
def test_carries_take_the_memory_of_donated_arguments_and_unread_ones(f):
    peak = peak_memory.peak_of(f, FLOATS, sizes={"data": 8}, in_shardings=P("data"), donate_argnums=0)
    assert peak.ratio == pytest.approx(1, abs=0.01)


STACK, ROWS = peak_memory.floats(16, 256, 256), peak_memory.floats(256, 256)


def layers(x, w):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), h), x, w)


def states(x, w):
    return annotate(lax.scan(lambda h, _: (jnp.tanh(h), h), x, None, length=16)[1], P("data")) + w


SCANS = {
    "slices": lambda x, w: layers(x, w)[0],
    "stacks": states,
    "slices and stacks": lambda x, w: layers(x, w)[1] + w,
    "gradients": lambda x, w: jax.grad(lambda w: layers(x, w)[0].sum())(w),
}
"""Loops over arrays whose leading dim, that of the iterations, is sharded."""


@peak_memory.newest_jax_only
@pytest.mark.parametrize("batch", [P(), P("model")], ids=["replicated rows", "sharded rows"])
@pytest.mark.parametrize("name", SCANS)
def test_a_stack_with_sharded_iterations_is_resharded_outside_its_loop(name, batch):
    sizes = {"data": 4, "model": 2}
    peak = peak_memory.peak_of(SCANS[name], ROWS, STACK, sizes=sizes, in_shardings=(batch, P("data")))
    assert peak.ratio == pytest.approx(1, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "described"), [compilers.COMPILERS["tpu"], compilers.COMPILERS["gpu"]])
def test_so_it_is_by_the_compilers_for_tpus_and_gpus(platform, described):
    x, w = peak_memory.floats(2048, 2048), peak_memory.floats(16, 2048, 2048)
    with sharding.mesh(data=4, model=2, devices=compilers.devices(described)):
        f = sharding.jit(SCANS["slices"], in_shardings=(P(), P("data")))
        found = usage(f.complete(x, w).assignment, platform=platform).peak_bytes
        assert found == pytest.approx(peak_memory.compiled_bytes(f.lower(x, w)), rel=0.02)


def iterated(unroll):
    """A scan that only carries values."""

    def f(x, y):
        def body(carry, _):
            a, b = carry
            return (jnp.tanh(a @ b) + y, b), None

        return lax.scan(body, (x, y), length=3, unroll=unroll)[0][0]

    return f


@pytest.mark.parametrize("platform", TRAITS)
def test_a_scan_of_carried_values_that_is_unrolled_whole_is_no_loop(platform):
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def instructions(unroll):
        with sharding.mesh(data=8):
            assignment = sharding.jit(iterated(unroll), in_shardings=(P("data"), P())).complete(x, x).assignment
        return lower(assignment, TRAITS[platform]).body.live_instructions()

    unrolled = instructions(3)
    assert not any(one.bodies for one in unrolled)
    assert sum(one.name == "dot_general" for one in unrolled) == 3
    assert [one.name for one in instructions(2) if one.bodies] == ["scan"]
