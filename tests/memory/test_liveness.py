"""Lifetimes against a scan of every step, and against bytes counted by hand."""

import random
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support import peak_memory

import sharding
from sharding import P
from sharding.memory import usage
from sharding.memory.fusion import fuse
from sharding.memory.heap_simulator import block_bytes
from sharding.memory.instruction import Body, Instruction, users
from sharding.memory.kernel_order import as_written, result_by_result, xla_cpu_order
from sharding.memory.liveness import lifetimes


def random_body(seed):
    """Instructions of every role that read earlier ones."""
    rng = random.Random(seed)
    made = [Instruction("argument", "argument", [], (64,), 256) for _ in range(3)]
    arguments = list(made)
    for _ in range(rng.randint(5, 40)):
        role = rng.choice(["fusible", "fusible", "unfusible", "bitcast"])
        num_operands = 1 if role == "bitcast" else rng.randint(1, 3)
        operands = [rng.choice(made[-8:]) for _ in range(num_operands)]
        shape = operands[0].shape if role != "unfusible" else (rng.choice([16, 64, 128, 1024]),)
        name = rng.choice(["add", "exp", "transpose"]) if role == "fusible" else role
        group = rng.choice(["x", "y"]) if role == "unfusible" and rng.random() < 0.3 else None
        facts = {"elementwise": name in ("add", "exp"), "expensive": name == "exp", "group": group}
        made.append(Instruction(name, role, operands, shape, 4 * shape[0], **facts))
    return Body(made, arguments, rng.sample(made[3:], min(2, len(made) - 3)))


def bytes_by_walking(found, step):
    """Live bytes at one step, by checking every buffer."""
    return sum(b.num_bytes for b in found.buffers if b.is_temporary and b.born <= step <= b.dies)


@pytest.mark.parametrize("order", [xla_cpu_order, as_written, result_by_result])
def test_timeline_is_the_sum_of_live_buffers(order):
    for seed in range(60):
        found = lifetimes(random_body(seed), [], set(), [order])
        walked = [bytes_by_walking(found, k) for k in range(len(found.steps))]
        assert found.timeline() == walked
        assert found.peak_bytes() == max(walked) <= block_bytes(found.intervals())


@pytest.mark.parametrize("order", [xla_cpu_order, as_written, result_by_result])
def test_nothing_is_read_before_it_is_produced_or_after_its_buffer_is_reused(order):
    for seed in range(60):
        body = random_body(seed)
        found = lifetimes(body, [], set(), [order])
        place = {x: (b, born, k) for b in found.buffers for k, (born, x) in enumerate(b.makers)}
        for now, step in enumerate(found.steps):
            for x in step.operands:
                buffer, born, k = place[x]
                assert (born < now or x.role == "argument") and now <= buffer.dies
                later = buffer.makers[k + 1 :]
                views = [m for _, m in later if m.role == "bitcast"]
                assert all(at >= now for at, m in later if m not in views), (seed, x)


def test_every_stored_value_is_produced_once_and_every_operand_is_stored():
    for seed in range(60):
        body = random_body(seed)
        kernels = fuse(body.live_instructions(), body.results)
        roots = {kernel.root for kernel in kernels}
        assert len(roots) == len(kernels)
        assert all(x in roots for kernel in kernels for x in kernel.operands)
        assert {*body.results} <= roots


def test_an_expensive_value_is_computed_once_for_all_its_users():
    for seed in range(150):
        body = random_body(seed)
        kernels = fuse(body.live_instructions(), body.results)
        count = Counter(m for kernel in kernels for m in kernel.members)
        for one, its_users in users(body.live_instructions()).items():
            assert count[one] <= 1 or not one.expensive or len(its_users) < 2


def on_one_device(f, *args):
    with sharding.mesh(data=1, devices=jax.devices()[:1]):
        return usage(sharding.jit(f).complete(*args).assignment)


SQUARE = 64 * 64 * 4
"""Bytes of one array."""
SHAPE = peak_memory.floats(64, 64)


def dots(x, n):
    for _ in range(n):
        x = x @ x
    return x


def loop(x):
    def body(carry, _):
        carry = carry @ x
        return carry, carry

    return lax.scan(body, x, None, length=5)[1].sum()


BY_HAND = {
    "one dot makes the result": (lambda x: x @ x, 0),
    "the first dot, as its buffer is live while the second writes the result": (lambda x: dots(x, 2), 1),
    "an elementwise chain is one kernel": (lambda x: jnp.sin(x * 2 + 1) * x, 0),
    "the operand of a dot is stored": (lambda x: (jnp.sin(x * 2 + 1) * x) @ x, 1),
    "a stack of five, the carry and the next one": (loop, 7),
    "an elementwise result is written into its operand's buffer": (lambda x: jnp.sin(x @ x) @ x, 1),
    "an update is written in place": (lambda x: lax.dynamic_update_slice(x @ x, x[:1], (3, 0)) @ x, 1),
    "an update of an argument is written into a copy": (
        lambda x: lax.dynamic_update_slice(x, x[:1] * 2, (3, 0)) @ x,
        1,
    ),
}
"""Case -> a function of one square array, and the number of arrays in its temporaries."""


@pytest.mark.parametrize("name", BY_HAND)
def test_temporaries_counted_by_hand(name):
    f, count = BY_HAND[name]
    assert on_one_device(f, SHAPE).temporary_bytes == count * SQUARE


@peak_memory.newest_jax_only
@pytest.mark.parametrize("name", BY_HAND)
def test_xla_stores_as_much(name):
    f, _ = BY_HAND[name]
    peak = peak_memory.peak_of(f, SHAPE, sizes={"data": 8})
    assert 0 <= peak.compiled - peak.predicted <= 128  # counters of loops


def test_an_expensive_op_with_two_readers_is_stored_and_a_cheap_one_is_not():
    def two(f):
        return lambda x: ((f(x) + 1) @ x, (f(x) * 2) @ x)

    stored = [
        [k.root.name for step in on_one_device(two(f), SHAPE).lifetimes.steps for k in step.kernels]
        for f in (lambda x: x + 3, jnp.tanh)
    ]
    assert [names.count("tanh") for names in stored] == [0, 1]
    assert [names.count("add") for names in stored] == [1, 1]


def test_a_loop_holds_its_carry_once_and_its_stack_from_the_start():
    found = on_one_device(loop, SHAPE)
    alive = [(b.num_bytes, [m.name for _, m in b.makers]) for b in found.lifetimes.buffers if b.is_temporary]
    assert (5 * SQUARE, ["broadcast", "scan"]) in alive  # the stack reuses the zeros' buffer
    assert (SQUARE, ["copy", "scan"]) in alive  # the carry begins as a copy of an argument
    assert (
        max(body.peak_bytes() for inner in found.lifetimes.nested.values() for body in inner) == SQUARE
    )  # the new carry, while the old one is still read


def test_independent_all_reduces_are_one_step():
    def f(a, b):
        total = a.sum(0)
        return total, b.sum(0), (b * total[None]).sum(0)

    with sharding.mesh(data=8):
        c = sharding.jit(f, in_shardings=P("data")).complete(peak_memory.floats(8, 64), peak_memory.floats(8, 64))
    steps = usage(c.assignment).lifetimes.steps
    combined = [len(s.kernels) for s in steps if s.kernels[0].root.name == "all-reduce"]
    assert combined == [2, 1]


def rewritten_cache(cache, x):
    """Each row read and written by a loop: the old cache is read until the new one is complete."""

    def body(carry, row):
        new = row.at[0].set(carry[0])
        return carry @ new, new

    return lax.scan(body, x, cache)


@jax.custom_vjp
def first(x, y):
    return x


first.defvjp(lambda x, y: (x, None), lambda _, g: (g, g))


PLACED = {
    "a donated cache is copied in the end": (rewritten_cache, (peak_memory.floats(8, 64, 64), SHAPE), True),
    "an argument that only a custom rule reads is kept": (lambda x, y: first(x, y) @ x, (SHAPE, SHAPE), False),
}
"""Case -> a function, its arguments, and whether the first is donated."""


@peak_memory.newest_jax_only
@pytest.mark.parametrize("name", PLACED)
def test_xla_places_as_much(name):
    f, args, is_donated = PLACED[name]
    options = {"donate_argnums": 0} if is_donated else {}
    peak = peak_memory.peak_of(f, *args, sizes={"data": 8}, **options)
    assert abs(peak.compiled - peak.predicted) <= 256  # counters of loops and keys


def updated(x, y):
    return x.at[jnp.arange(4)].set(y[:4])


SHARED = {
    "made, then updated": lambda x, y: updated(jnp.sort(x, 0) * y[:1], y) @ x.T,
    "updated, then changed": lambda x, y: jnp.exp(updated(jnp.sort(x, 0), y)) @ x.T,
    "changed again": lambda x, y: jnp.exp(jnp.sort(x, 0) @ y.T) @ y[:, :8],
    "carried": lambda x, y: lax.fori_loop(0, 3, lambda _, z: jnp.sort(z, 0) * y[:1], x) @ y.T,
    "changed before a loop": lambda x, y: lax.fori_loop(0, 3, lambda _, z: jnp.sort(z, 0), jnp.exp(x @ y.T)),
    "changed behind a loop": lambda x, y: jnp.exp(lax.fori_loop(0, 3, lambda _, z: jnp.sort(z, 0), x @ y.T)) @ y[:, :8],
    "changed behind a branch": lambda x, y: jnp.exp(lax.cond(y[0, 0] > 0, jnp.sort, jnp.fft.ifft, x + 0j).real) @ y.T,
    "updated where it is made": lambda x, y: (z := x[:, :1] @ y[:1], lax.dynamic_update_slice(z, y[:, :4], (0, 0))),
    "barrier": lambda x, y: jnp.exp(lax.optimization_barrier(jnp.sort(x, 0))) @ y.T,
}


@peak_memory.newest_jax_only
@pytest.mark.parametrize("name", SHARED)
def test_what_is_updated_in_place_shares_no_other_buffer(name):
    x = peak_memory.floats(256, 4096 if "loop" not in name else 256)
    found = peak_memory.peak_of(SHARED[name], x, x, sizes={"data": 8})
    assert found.ratio == pytest.approx(1, abs=0.01)


@peak_memory.newest_jax_only
@pytest.mark.parametrize("donated", [(), (0,)])
def test_temporaries_lie_in_the_buffers_of_results(donated):
    """Not in one that is donated, whose old array is still read."""

    def update(w, x):
        return w - 0.01 * (x.T @ x)

    w, x = peak_memory.floats(512, 512), peak_memory.floats(256, 512)
    options = {"in_shardings": (P(), P("data")), "donate_argnums": donated}
    peak = peak_memory.peak_of(update, w, x, sizes={"data": 8}, **options)
    assert abs(peak.compiled - peak.predicted) <= 256
