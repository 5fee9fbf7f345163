"""What is said of indices holds for the numbers that programs compute, and is said where it can be."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sharding.jit import known_indices
from sharding.jit.known_indices import of_constant, of_result, of_row, of_stack

X = np.random.default_rng(0).integers(-3, 4, (2, 3), np.int32)


def holds(value: np.ndarray, index: known_indices.Index) -> bool:
    """Whether an array is as an index says: one number, or counting along a dim, for each column."""
    value = np.asarray(value)
    if isinstance(index, int):
        return bool((value.astype(np.int64) == index).all())
    columns = [slice(None)] if len(index) == 1 else range(value.shape[-1])
    assert len(index) in (1, value.shape[-1])
    for column, dim in zip(columns, index, strict=True):
        if dim is not None:
            counted = np.broadcast_to(np.expand_dims(np.arange(value.shape[dim]), [
                d for d in range(value.ndim) if d != dim
            ]), value.shape)  # fmt: skip
            if not np.array_equal(value[..., column], counted[..., column]):
                return False
    return True


def run(fn, *args) -> dict[str, list]:
    """Primitive -> what is said of its results; fails if it does not hold."""
    closed = jax.make_jaxpr(fn)(*args)
    values = dict(zip(closed.jaxpr.invars, args, strict=True))
    known, found = {}, {}
    for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        values[var] = const
        if (index := of_constant(const)) is not None:
            known[var] = index
    for eqn in closed.jaxpr.eqns:
        operands = [v.val if hasattr(v, "val") else values[v] for v in eqn.invars]
        results = eqn.primitive.bind(*operands, **eqn.params)
        results = results if eqn.primitive.multiple_results else [results]
        values.update(zip(eqn.outvars, results, strict=True))
        index = of_result(eqn, known)
        if index is not None:
            assert holds(results[0], index), (eqn, index)
            known[eqn.outvars[0]] = index
        found.setdefault(eqn.primitive.name, []).append(index)
    return found


COMPARED = [lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge]
COMPUTED = [lax.add, lax.sub, lax.mul, lax.max, lax.min]


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int8"])
def test_constants_are_folded(dtype: str):
    def fn():
        found = []
        for a in (0, 1, 3, 7):
            for b in (0, 1, 3, 250 if dtype == "uint8" else 7):
                one, other = (lax.full((2,), n, dtype) for n in (a, b))
                found += [f(one, other) for f in (*COMPARED, *COMPUTED)]
                found += [lax.bitwise_and(one, other), lax.bitwise_or(one, other), lax.bitwise_not(one)]
        return found

    said = run(fn)
    for name, values in said.items():
        assert None not in values, name
    assert len(said) >= 14


def test_equal_operands():
    def fn(x):
        return [f(x, x) for f in (*COMPARED, lax.sub, lax.bitwise_xor, lax.add, lax.bitwise_and)]

    said = {name: values[0] for name, values in run(fn, X).items()}
    assert said == {"eq": 1, "ne": 0, "lt": 0, "le": 1, "gt": 0, "ge": 1, "sub": 0, "xor": 0, "add": None, "and": None}
    floats = run(lambda x: [lax.eq(x, x), lax.sub(x, x)], np.array([np.nan, 1.0], np.float32))
    assert floats == {"eq": [None], "sub": [None]}  # not a number is not equal to itself


def test_masks():
    ones, zeros = np.ones((2, 3), bool), np.zeros((2, 3), bool)

    def fn(x):
        mask = lax.gt(x, lax.full((2, 3), 0, "int32"))
        both = [lax.bitwise_and(mask, zeros), lax.bitwise_and(ones, mask)]
        either = [lax.bitwise_or(mask, ones), lax.bitwise_or(mask, zeros)]
        numbers = lax.bitwise_or(x, lax.full((2, 3), 1, "int32"))
        return both, either, numbers

    said = run(fn, X)
    assert said["and"] == [0, None] and said["or"] == [1, None, None]


def test_choices_by_a_constant():
    def fn(x, y):
        false, true = (lax.full((2, 3), value, bool) for value in (False, True))
        rows = lax.broadcasted_iota(jnp.int32, (2, 3), 0)
        return [lax.select_n(which, rows, y) for which in (false, true)] + [lax.select_n(lax.gt(x, y), rows, rows)]

    assert run(fn, X, X + 1)["select_n"] == [(0,), None, None]


def test_counters_move_with_their_dims():
    def fn():
        rows, columns = (lax.broadcasted_iota(jnp.int32, (2, 3), d) for d in (0, 1))
        found = [lax.transpose(rows, (1, 0)), lax.transpose(columns, (1, 0))]
        found += [lax.reshape(rows, (2, 1, 3)), lax.reshape(columns, (1, 2, 3)), lax.reshape(rows, (6,))]
        wide = lax.broadcast_in_dim(rows, (2, 4, 3), (0, 2))
        narrow = lax.broadcast_in_dim(lax.broadcasted_iota(jnp.int32, (1, 3), 0), (5, 3), (0, 1))
        found += [wide, narrow, lax.squeeze(lax.reshape(rows, (2, 1, 3)), (1,))]
        return [*found, lax.neg(rows), lax.add(rows, columns)]

    said = run(fn)
    assert said["iota"] == [(0,), (1,), (0,)]
    assert said["transpose"] == [(1,), (0,)]
    assert said["reshape"][:3] == [(0,), (2,), None]
    assert said["broadcast_in_dim"][0] == (0,) and said["squeeze"] == [(0,)]
    assert said["broadcast_in_dim"][1] in (None, 0)  # one row repeated counts nothing
    assert said["neg"] == [None] and said["add"] == [None]


def test_a_counter_is_not_below_zero():
    def fn(x):
        rows = lax.broadcasted_iota(jnp.int32, (2, 3), 0)
        zero, one = (lax.full((2, 3), n, "int32") for n in (0, 1))
        half = lax.concatenate([rows, x], 1)
        return lax.lt(rows, zero), lax.lt(rows, one), lax.lt(half, lax.full((2, 6), 0, "int32")), lax.lt(zero, rows)

    assert run(fn, X)["lt"] == [0, None, None, None]


def test_columns_side_by_side():
    def fn(x):
        rows = lax.broadcasted_iota(jnp.int32, (4, 3, 1), 0)
        more = lax.broadcasted_iota(jnp.int32, (4, 3, 1), 1)
        last = lax.broadcasted_iota(jnp.int32, (4, 3, 2), 2)
        unknown = lax.reshape(lax.concatenate([x, x], 0), (4, 3, 1))
        found = [lax.concatenate([rows, more], 2), lax.concatenate([more, unknown, rows], 2)]
        found += [lax.concatenate([rows, last], 2), lax.concatenate([unknown, unknown], 2)]
        found += [lax.concatenate([rows, more], 1)]
        pair = lax.concatenate([rows, more], 2)
        found += [lax.concatenate([pair, rows], 2), lax.transpose(pair, (1, 0, 2)), lax.transpose(pair, (2, 0, 1))]
        return [*found, lax.reshape(pair, (2, 2, 3, 2)), lax.reshape(pair, (12, 2))]

    said = run(fn, X)
    assert said["reshape"][-2:] == [(None, 2), None]
    of_pairs = said["concatenate"][1:]
    assert of_pairs[:5] == [(0, 1), (1, None, 0), (0, None, None), None, None]
    assert said["transpose"] == [(1, 0), None]
    for count in (8, 9):
        part = run(lambda n=count: lax.concatenate([lax.broadcasted_iota(jnp.int32, (3, n), 0)] * 2, 1))
        assert part["concatenate"] == [(0,) * 16 if count == 8 else None]


def test_counters_need_a_dtype_that_holds_them():
    for size, expected in ((128, (0,)), (129, None), (256, None)):

        def fn(n=size):
            counted = lax.iota(jnp.int32, n)
            return lax.convert_element_type(counted, jnp.int8), lax.iota(jnp.int8, n) if n <= 128 else counted

        said = run(fn)
        assert said["convert_element_type"] == [expected] and said["iota"][0] == (0,)
    assert run(lambda: lax.convert_element_type(lax.iota(jnp.int32, 4), jnp.float32))["convert_element_type"] == [None]
    assert run(lambda: lax.iota(jnp.float32, 4))["iota"] == [None]


def test_constants_of_a_program():
    assert of_constant(np.full((3, 2), 5)) == 5 and of_constant(np.zeros(4, bool)) == 0
    assert of_constant(np.arange(6)) == (0,) and of_constant(np.arange(1, 7)) is None
    assert of_constant(np.arange(6).reshape(2, 3)) is None and of_constant(np.ones(3, np.float32)) is None
    assert of_constant(np.zeros(1, int)) is None and of_constant(np.zeros(0, int)) is None
    assert of_constant(np.zeros(65_536, np.int8)) == 0
    assert of_constant(np.zeros(65_537, np.int8)) is None
    assert of_constant(jax.random.key(0)) is None


def test_rows_of_stacks():
    assert of_stack((0, None, 2)) == (1, None, 3) and of_stack(4) == 4 and of_stack(None) is None
    assert of_row((1, None, 0, 3)) == (0, None, None, 2) and of_row(4) == 4 and of_row(None) is None


def test_random_programs():
    """Hundreds of short programs: whatever is said must hold."""
    said = 0
    for seed in range(60):
        generator = random.Random(seed)

        def fn(x, generator=generator):
            made = [x, lax.broadcasted_iota(jnp.int32, (2, 3), 0), lax.broadcasted_iota(jnp.int32, (2, 3), 1)]
            made += [lax.full((2, 3), generator.randrange(-1, 3), "int32")]
            for _ in range(12):
                a, b = generator.choices(made, k=2)
                kind = generator.randrange(6)
                if kind == 0:
                    made.append(generator.choice(COMPUTED)(a, b))
                elif kind == 1:
                    made.append(lax.convert_element_type(generator.choice(COMPARED)(a, b), jnp.int32))
                elif kind == 2:
                    made.append(lax.select_n(generator.choice(COMPARED)(a, b), a, generator.choice(made)))
                elif kind == 3:
                    made.append(lax.transpose(lax.reshape(lax.transpose(a, (1, 0)), (3, 2)), (1, 0)))
                elif kind == 4:
                    wide = lax.concatenate([a, b], 1)
                    made.append(lax.slice(wide, (0, 1), (2, 4)))
                else:
                    wide = lax.broadcast_in_dim(a, (2, 1, 3), (0, 2))
                    made.append(lax.squeeze(wide, (1,)))
            return made

        said += sum(index is not None for values in run(fn, X).values() for index in values)
    assert said > 300
