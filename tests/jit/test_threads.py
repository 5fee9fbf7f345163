"""Many threads and asyncio tasks call jitted functions: right numbers, no deadlock, nothing left changed."""

import asyncio
import contextlib
import gc
import logging
import random
import sys
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from sharding import P, ShardingError
from sharding.graph.garbage_collection import no_collection
from sharding.jit import executable_cache

MESHES = [{"data": 2, "tensor": 4}, {"data": 4, "tensor": 2}, {"data": 8}, {"tensor": 8}]


def product(x, w):
    return sharding.annotate(jnp.tanh(x @ w), P("data") if "data" in names() else P(None, "tensor"))


def names():
    return jax.sharding.get_abstract_mesh().axis_names


def scan(x, w):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), c.sum(1)), x, None, length=2)


def gradient(x, w):
    return jax.grad(lambda w: jnp.square(x @ w).sum())(w)


def scaled(x, w, factor):
    return (x * factor).sum(0) + w[0]


def reference(f, x, w, *static):
    w, x = np.asarray(w, np.float64), np.asarray(x, np.float64)
    if f is product:
        return np.tanh(x @ w)
    if f is scan:
        first = np.tanh(x @ w)
        return np.tanh(first @ w), np.stack([x.sum(1), first.sum(1)])
    if f is gradient:
        return 2 * x.T @ (x @ w)
    return (x * static[0]).sum(0) + w[0]


def jitted():
    """The four functions, shared by all threads."""
    return [
        (product, sharding.jit(product)),
        (scan, sharding.jit(scan, donate_argnums=(0,))),
        (gradient, sharding.jit(gradient)),
        (scaled, sharding.jit(scaled, static_argnames="factor")),
    ]


class Caller:
    """Calls the functions in random order, with random shapes, over one mesh; some calls fail as they should."""

    def __init__(self, functions, mesh, seed, shapes):
        self.functions, self.mesh, self.random, self.shapes = functions, mesh, random.Random(seed), shapes
        self.calls = 0

    def once(self):
        f, step = self.random.choice(self.functions)
        rows = 8 * self.random.choice(self.shapes)
        rng = np.random.default_rng(self.random.randrange(100))
        x, w = (rng.normal(scale=0.1, size=shape).astype("float32") for shape in ((rows, 16), (16, 16)))
        static = {"factor": float(self.random.randrange(3))} if f is scaled else {}
        if self.random.random() < 0.1:
            with pytest.raises((TypeError, ShardingError)):
                step(x, w[:, :, None, None] if f is not scaled else object(), **static)
            return
        expected = jax.tree.leaves(reference(f, x, w, *static.values()))
        if self.random.random() < 0.3:
            x, w = jax.device_put((x, w), jax.sharding.NamedSharding(jax.sharding.get_mesh(), P()))
        found = step(x, w, **static)
        for one, other in zip(jax.tree.leaves(found), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
        self.calls += 1

    def run(self, until, between=lambda: None):
        with sharding.mesh(self.mesh):
            while time.monotonic() < until:
                self.once()
                between()


def state_of_the_process():
    """What a library could leave changed behind."""
    loggers = [logging.getLogger(name) for name in (None, "jax", "absl", "sharding")]
    return [
        gc.isenabled(), gc.get_threshold(), list(gc.callbacks), sys.excepthook, sys.unraisablehook,
        sys.getrecursionlimit(), sys.gettrace(), sys.getprofile(), list(warnings.filters),
        [(one.level, one.disabled, list(one.filters), list(one.handlers)) for one in loggers],
        {name: getattr(jax.config, name, None) for name in jax.config.values},
    ]  # fmt: skip


def in_threads(workers, seconds):
    """Runs functions in threads of their own; raises their first error, or if one does not end."""
    errors, together = [], threading.Barrier(len(workers))

    def run(work):
        try:
            together.wait(60)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in workers]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not errors, errors[:3]
    assert not any(thread.is_alive() for thread in threads), "a deadlock"


def stress(monkeypatch, num_threads, seconds, shapes, num_cached):
    monkeypatch.setattr(executable_cache, "MAX_EXECUTABLES", num_cached)
    functions, before, interval = jitted(), state_of_the_process(), sys.getswitchinterval()
    callers = [Caller(functions, MESHES[k % len(MESHES)], k, shapes) for k in range(num_threads)]
    disturbances = [gc.collect, *(step.clear_cache for _, step in functions), jax.clear_caches]
    sys.setswitchinterval(1e-5)
    until = time.monotonic() + seconds
    chance = random.Random(0)

    def disturb():
        if chance.random() < 0.01:
            chance.choice(disturbances)()

    in_threads([lambda c=c: c.run(until, disturb) for c in callers], seconds + 300)
    sys.setswitchinterval(interval)
    assert all(caller.calls for caller in callers)
    assert state_of_the_process() == before


def test_threads_of_four_functions(monkeypatch):
    stress(monkeypatch, num_threads=8, seconds=2, shapes=[1], num_cached=3)


@pytest.mark.slow
def test_64_threads_for_a_minute(monkeypatch):
    stress(monkeypatch, num_threads=64, seconds=60, shapes=[1, 2, 3], num_cached=6)


@pytest.mark.parametrize("mesh", MESHES[:2])
def test_first_calls_that_race_trace_once(mesh):
    x, w = np.full((8, 16), 0.1, "float32"), np.full((16, 16), 0.1, "float32")
    found, traced = [], []

    @sharding.jit
    def step(x, w):
        traced.append(threading.get_ident())
        time.sleep(0.01)  # lets the others in
        return scan(x, w)

    context = sharding.mesh(mesh)

    def work():
        with context:
            found.append(jax.tree.leaves(step(x, w)))

    in_threads([work] * 8, 120)
    assert len(traced) == 1
    assert len({id(one.flat_jit) for one in step._cache.executables.values()}) == 1
    for leaves in found:
        for one, other in zip(leaves, jax.tree.leaves(reference(scan, x, w)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4)


def test_a_first_call_that_fails_leaves_the_turn_to_others():
    attempts = []

    @sharding.jit
    def step(x):
        attempts.append(0)
        if len(attempts) < 3:
            raise ValueError("at first")
        return x + 1

    def work():
        with sharding.mesh(data=8), contextlib.suppress(ValueError):
            np.testing.assert_array_equal(step(np.ones(8)), np.full(8, 2.0))

    in_threads([work] * 6, 60)
    assert len(attempts) == 3


def test_functions_that_call_each_other_from_two_threads(monkeypatch):
    monkeypatch.setattr(executable_cache, "MAX_WAIT_SECONDS", 0.1)
    both, here = threading.Barrier(2), threading.local()

    def body(other):
        def f(x):
            if getattr(here, "is_inside", False):
                return x * 2
            here.is_inside = True
            both.wait(10)
            return other()(x)

        return sharding.jit(f)

    one, two = body(lambda: two), body(lambda: one)

    def work(step):
        with sharding.mesh(data=8):
            np.testing.assert_array_equal(step(np.ones(8, "float32")), np.full(8, 2.0))

    in_threads([lambda: work(one), lambda: work(two)], 60)


def test_asyncio_tasks():
    functions = jitted()
    x, w = np.full((8, 16), 0.1, "float32"), np.full((16, 16), 0.1, "float32")

    async def task(k):
        f, step = functions[k % 3]
        with sharding.mesh(MESHES[k % 4]):
            for _ in range(2):
                await asyncio.sleep(0)
                if k % 5 == 4:
                    with contextlib.suppress(TypeError):
                        step(x, w, 3)
                found = step(x, w)
                await asyncio.sleep(0)
                for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(reference(f, x, w)), strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-4)

    async def all_tasks():
        await asyncio.gather(*(task(k) for k in range(8)))

    before = state_of_the_process()
    asyncio.run(all_tasks())
    assert state_of_the_process() == before


def test_the_collector_is_off_only_while_one_thread_traces():
    inside, leave = threading.Barrier(2), threading.Event()

    def trace():
        with no_collection():
            inside.wait(10)
            leave.wait(10)

    thread = threading.Thread(target=trace)
    thread.start()
    inside.wait(10)
    assert not gc.isenabled()
    with no_collection():
        assert gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_a_collector_that_the_user_disabled_stays_so():
    gc.disable()
    try:
        with no_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_error_inside_enables_the_collector_again():
    with pytest.raises(RuntimeError, match="inside"), no_collection():
        raise RuntimeError("inside")
    assert gc.isenabled()
