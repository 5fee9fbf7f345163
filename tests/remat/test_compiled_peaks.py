"""`remat.fit` on real devices: the compiled program is within every budget, and no slower with a larger one."""

import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilers import COMPILERS
from support.peak_memory import compiled_bytes
from support.remat_programs import PROGRAMS, arrays_of, auto, fitted, groups, mlp, scanned, two_devices

import sharding
from sharding import P, ShardingError, remat
from sharding.remat.budget_program import AutoProgram


def step_of(fun):
    return sharding.jit(jax.value_and_grad(fun), in_shardings=(None, P("data")))


def least_of(free):
    """The least limit that an error names."""
    with two_devices(), pytest.raises(ShardingError, match="compiled, whatever is recomputed") as error:
        free.within(1)
    return int(re.search(r"fix: +memory_bytes=(\d+)", str(error.value))[1])


def within_each_budget(fun, *, num_budgets=5):
    """The programs for budgets from the least that XLA allocates to more than what any of them takes."""
    args = PROGRAMS[fun]
    free = fitted(fun, args, 1e12)
    least, most = least_of(free), max(free.compiled_bytes, free.tradeoffs[-1].peak_bytes)
    found = []
    for budget in np.linspace(least, 1.1 * most, num_budgets).round().tolist():
        with two_devices():
            found.append(free.within(budget))
            assert compiled_bytes(found[-1].step.lower(*args)) == found[-1].compiled_bytes <= budget
    seconds = [one.cost.seconds for one in found]
    assert seconds == sorted(seconds, reverse=True)
    assert "nine of ten" not in str(found[-1])
    return found


def test_no_compiled_program_exceeds_its_budget():
    found = within_each_budget(groups)
    assert len({one.compiled_bytes for one in found}) > 2


@pytest.mark.slow
@pytest.mark.parametrize("fun", PROGRAMS, ids=lambda fun: fun.__name__)
def test_none_of_many_programs_exceeds_its_budget(fun):
    within_each_budget(fun)


@pytest.mark.slow
@pytest.mark.parametrize("fun", PROGRAMS, ids=lambda fun: fun.__name__)
def test_the_fastest_program_whose_compiled_peak_is_within_a_budget(fun):
    free = fitted(fun, PROGRAMS[fun], 1e12, peak="compiled")
    least = least_of(free)
    for budget in np.linspace(least, 1.1 * max(least, free.compiled_bytes), 5).round().tolist():
        with two_devices():
            found, careful = free.within(budget, peak="compiled"), free.within(budget)
            assert compiled_bytes(found.step.lower(*PROGRAMS[fun])) == found.compiled_bytes <= budget
        if careful.cost in free.tradeoffs:
            assert found.cost.seconds <= careful.cost.seconds


def test_another_program_is_chosen_where_the_predicted_one_exceeds_the_budget():
    free = fitted(scanned, PROGRAMS[scanned], 1e12)
    budget = free.tradeoffs[-1].peak_bytes
    with two_devices():
        predicted, found = free.within(budget, peak="predicted"), free.within(budget)
        assert found.compiled_bytes <= budget < compiled_bytes(predicted.step.lower(*PROGRAMS[scanned]))
    assert predicted.compiled_bytes is None and "nine of ten" in str(predicted)


@pytest.mark.parametrize("fun", [mlp, groups], ids=lambda fun: fun.__name__)
def test_a_larger_limit_has_the_choices_of_a_smaller_one_and_perhaps_faster_ones(fun):
    with two_devices():
        program = AutoProgram.of(step_of(fun), PROGRAMS[fun], names=None, host_memory_bytes=None, hardware=None)
        found = program.tradeoffs()
        limits = np.linspace(0, 1.1 * found[-1][1].peak_bytes, 24)
        candidates = [list(program.within(found, limit)) for limit in limits]
    assert len(candidates[-1]) > len(candidates[0]) == 1
    for smaller, larger in zip(candidates, candidates[1:], strict=False):
        kept = [one for one in larger if one in smaller]
        assert kept == smaller
    for limit, found in zip(limits, candidates, strict=True):
        seconds = [cost.seconds for _, cost in found]
        assert seconds == sorted(seconds)
        assert all(cost.peak_bytes <= limit for _, cost in found[:-1])


def test_what_was_compiled_runs_and_nothing_compiles_twice(compiles):
    args = arrays_of(PROGRAMS[mlp])
    step = step_of(mlp)
    with two_devices():
        args = jax.device_put(args, step.complete(*args).in_shardings)
        jax.block_until_ready(args)
        before = len(compiles)
        found = remat.fit(step, *PROGRAMS[mlp], memory_bytes=1e12)
        assert len(compiles) == before + 1
        jax.block_until_ready([found.step(*args), found.step(*args)])
        again = found.within(1e11)
        jax.block_until_ready(again.step(*args))
        assert len(compiles) == before + 1
        limit = least_of(found)
        slowest = found.within(limit)
        before = len(compiles)
        assert found.within(limit).policies == slowest.policies
        assert len(compiles) == before
    assert step._cache_size() == 1  # completed above


def test_only_the_programs_in_use_stay_loaded(compiles):
    loaded = jax.devices()[0].client.live_executables
    gc.collect()
    before = len(loaded())
    free = fitted(scanned, PROGRAMS[scanned], 1e12)
    with two_devices():
        found = free.within(least_of(free))
    gc.collect()
    assert len(compiles) > 1 and len(loaded()) <= before + 2
    assert found.compiled_bytes < free.compiled_bytes
    del free
    gc.collect()
    assert len(loaded()) <= before + 1


def test_nothing_compiles_for_described_devices(compiles):
    with sharding.mesh(data=4, devices="v5p:2x2x1"):
        found = remat.fit(step_of(mlp), *PROGRAMS[mlp], memory_bytes=1e12)
        found.within(found.tradeoffs[0].peak_bytes)
    assert found.compiled_bytes is None and not compiles


def test_described_devices_have_no_compiled_peak():
    with (
        sharding.mesh(data=4, devices="v5p:2x2x1"),
        pytest.raises(ShardingError, match=r"(?s)described devices.*fix: +peak=\"predicted\""),
    ):
        remat.fit(step_of(mlp), *PROGRAMS[mlp], memory_bytes=1e12, peak="compiled")


@pytest.mark.slow
@COMPILERS["tpu"].marks[0]
def test_programs_that_xla_refuses_are_passed_over():
    def step(width):
        with_two = auto(lambda w, x: x + jnp.tanh(jnp.sin(x @ w[0]) @ w[1]))
        loss = lambda ws, x: jnp.sum(jax.lax.scan(lambda x, w: (with_two(w, x), None), x, ws)[0])  # noqa: E731
        args = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((16, 2, 4096, 4096), (width, 4096)))
        return sharding.jit(jax.grad(loss), in_shardings=(None, P("data"))), *args

    with sharding.mesh(data=4, devices=sharding.cost.compile_only("v5e:2x2")):
        found = remat.fit(*step(2**17), memory_bytes=60e9)
        assert found.compiled_bytes < 17e9 < found.tradeoffs[-1].peak_bytes  # what a v5e has
        with pytest.raises(ShardingError, match=r"(?s)RESOURCE_EXHAUSTED.*a choice that XLA compiles"):
            remat.fit(*step(2**20), memory_bytes=60e9)


def test_a_limit_below_the_least_compiled_peak():
    free = fitted(mlp, PROGRAMS[mlp], 1e12)
    least = least_of(free)
    with two_devices():
        assert free.within(least).compiled_bytes == least
        with pytest.raises(ShardingError, match=rf"(?s)at least {least:,} bytes .* compiled.*predicted: "):
            free.within(least - 1)
