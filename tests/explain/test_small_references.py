"""Parts of explanations compared with brute force: rotations, loops, repeated steps and layers, savings."""

import itertools
import random
import warnings
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from sharding import P
from sharding.explain.compile_time import _depths, _longest_run, repeated_layers
from sharding.explain.why import repeats
from sharding.graph import Op


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def ledger_of(fn, sizes: dict[str, int], *args, **options):
    with sharding.mesh(sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))]):
        return sharding.jit(fn, **options).complete(*args).communication()


def rows_from_elsewhere(length: int, parts: int, shift: int) -> dict[int, int]:
    """How many devices away -> the rows of device 0's new shard that come from there."""
    rows = length // parts
    return Counter(away for row in range(rows) if (away := (0 - ((row - shift) % length) // rows) % parts))


@pytest.mark.parametrize("parts", [2, 4])
def test_a_rotation_sends_the_rows_that_change_devices(parts: int):
    length = 16
    for shift in range(1, length):
        found = ledger_of(
            lambda x, n=shift: jnp.roll(x, n, 0) * 2, {"a": parts}, floats(length, 3), in_shardings=P("a")
        )
        expected = rows_from_elsewhere(length, parts, shift)
        assert sorted(c.result_bytes for c in found) == sorted(12 * n for n in expected.values()), shift
        assert {(c.kind, c.axes, c.count) for c in found} == {("collective-permute", ("a",), 1)}


@pytest.mark.parametrize(("length", "shift"), [(5, 1), (9, 3), (13, -1), (14, 5), (15, 4)])
def test_a_rotation_of_uneven_shards_is_as_compiled(length: int, shift: int):
    """XLA rotates them twice; devices without a row take no part."""

    def fn(x):
        return sharding.annotate(jnp.roll(sharding.annotate(x * 1.5, P("a")), shift, 0) * 2, P("a"))

    with warnings.catch_warnings(), sharding.mesh(a=4, devices=jax.devices()[:4]):
        warnings.simplefilter("ignore")
        step = sharding.jit(fn)
        found = step.complete(floats(length, 3)).verify(step.lower(floats(length, 3)).compile())
    assert found.agrees and "collective-permute" in found.predicted


def test_collectives_of_a_loop_run_as_often_as_the_loop():
    """Those of its carry in every iteration, those of what it only reads once; in nested loops the product."""

    def once(c, w):
        best = jnp.argmax(c, -1)
        return jnp.tanh(c @ w) + best[:, None]

    def inner(c, w, times):
        return jax.lax.scan(lambda c, _: (once(c, w), None), c, length=times)[0]

    def nested(c, w):
        return jax.lax.scan(lambda c, _: (inner(c, w, 5), None), c, length=3)[0]

    args, options = (floats(8, 16), floats(16, 16)), {"in_shardings": (P(None, "a"), P("a"))}
    single = Counter((c.kind, c.op, c.dtype, c.result_bytes) for c in ledger_of(once, {"a": 4}, *args, **options))
    assert len(single) >= 3
    for fn, times in ((lambda c, w: inner(c, w, 7), 7), (nested, 15)):
        found = ledger_of(fn, {"a": 4}, *args, **options)
        repeated = [c for c in found if c.op in ("argmax", "dot_general") and c.kind != "reduce-scatter"]
        assert repeated and {c.count for c in repeated if not c.is_move} == {times}
        of_argmax = Counter((c.kind, c.dtype, c.result_bytes) for c in found if c.op == "argmax" and not c.is_move)
        assert of_argmax == Counter(
            {(kind, dtype, size): n for (kind, op, dtype, size), n in single.items() if op == "argmax"}
        )


def covered(items: list[int]) -> list[tuple[int, int, int]]:
    """Greedily, by trying every period and number of repetitions."""
    found, at = [], 0
    while at < len(items):
        best = (1, 1)
        for period in range(1, len(items) - at + 1):
            times = 1
            while items[at : at + period] * (times + 1) == items[at : at + period * (times + 1)]:
                times += 1
            if times > 1 and (period * times, -period) > (best[0] * best[1], -best[0]):
                best = (period, times)
        found.append((at, *best))
        at += best[0] * best[1]
    return found


def test_repeated_steps():
    for seed in range(300):
        generator = random.Random(seed)
        items: list[int] = []
        while len(items) < 12:
            part = generator.choices(range(3), k=generator.randrange(1, 4))
            items += part * generator.randrange(1, 4)
        runs = list(repeats(items))
        assert runs == covered(items), items
        assert [x for start, period, times in runs for x in items[start : start + period] * times] == items
    assert list(repeats([])) == []
    # At the longest period that is looked for, and beyond.
    for period in (255, 256, 257):
        runs = list(repeats([*range(period)] * 2))
        assert runs == ([(0, period, 2)] if period <= 256 else [(k, 1, 1) for k in range(514)])


def test_the_longest_periodic_run():
    for seed in range(200):
        generator = random.Random(seed)
        num = generator.randrange(1, 16)
        signatures = np.array(generator.choices(range(2), k=num))
        depths = np.array(generator.choices(range(3), k=num))
        for period in range(1, num // 2 + 1):
            equal = [
                signatures[k] == signatures[k - period] and depths[k] != depths[k - period] for k in range(period, num)
            ]
            best, start = 0, 0
            for begin in range(len(equal)):
                length = len(list(itertools.takewhile(bool, equal[begin:])))
                if length > best:
                    best, start = length, begin
            expected = (best + period, period, start) if best else (0, period, 0)
            assert _longest_run(signatures, depths, period) == expected


def test_depths_are_the_longest_paths():
    for seed in range(50):
        generator = random.Random(seed)
        ops, paths = [], dict.fromkeys(range(3), 0)
        for value in range(3, 15):
            name = generator.choice(["dot_general", "add", "sort", "exp"])
            operands = generator.choices(range(value), k=generator.randrange(1, 3))
            paths[value] = max(paths[v] for v in operands) + (name in ("dot_general", "sort"))
            ops.append(Op(name=name, operands=tuple(operands), results=(value,), rule=None, site=(), times=1))
        assert _depths(ops) == {value: paths[value] for value in range(3, 15)}


def ops_of(words: str) -> list[Op]:
    """A chain of ops: d, e products and a an addition, each of its own shape."""
    names = {"a": "add", "d": "dot_general", "e": "sort"}
    return [
        Op(name=names[word], operands=(k,), results=(k + 1,), rule=None, site=(), times=1)
        for k, word in enumerate(words)
    ]


@pytest.mark.parametrize(
    ("layer", "count", "rest", "expected"),
    [
        ("d", 3, "", (3, 1)),
        ("daa", 3, "", (3, 3)),
        ("daea", 5, "", (5, 4)),
        ("dada", 4, "", (8, 2)),
        ("da", 2, "", None),  # too few
        ("da", 4, "e", (4, 2)),
        ("daaaaa", 3, "eee", (3, 6)),  # half of the products
        ("da", 3, "eeee", None),  # less
    ],
)
def test_equal_layers_by_hand(layer: str, count: int, rest: str, expected: tuple[int, int] | None):
    """(layers, ops per layer) of equal layers, and of other products behind them, each of a shape of its own."""
    ops = ops_of(layer * count + rest)
    graph = SimpleNamespace(shapes=[(2,)] * (len(ops) + 1 - len(rest)) + [(3 + k,) for k in range(len(rest))])
    found = repeated_layers(graph, ops)
    if expected is None:
        assert found is None
        return
    assert found is not None and (found.count, found.ops_per_layer) == expected
    assert not found.is_initialisation and found.source == "an unknown line"


def test_savings_need_a_dim_that_divides():
    """Of each axis that an array is not sharded over: all but a share of its bytes, if some local dim divides."""

    def fn(params, x):
        return [jnp.sum(x) * p for p in params]

    shapes = [(7, 5), (8, 5), (6, 9), (12, 4)]
    with sharding.mesh(data=2, tensor=3, one=1, devices=jax.devices()[:6]):
        specs = ([P(), P("data"), P("data"), P("tensor")], P())
        report = sharding.jit(fn, in_shardings=specs).complete([floats(*s) for s in shapes], floats(4)).memory()
    arrays = {a.name: a for a in report.arrays}
    assert [dict(arrays[f"params/{k}"].saved_bytes) for k in range(4)] == [
        {"data": 0, "tensor": 0},
        {"tensor": 0},
        {"tensor": 3 * 9 * 4 - 3 * 9 * 4 // 3},
        {"data": 4 * 4 * 4 - 4 * 4 * 4 // 2},
    ]
    assert dict(arrays["x"].saved_bytes) == {"data": 8, "tensor": 0}
    sizes = [(a.num_bytes, a.born, a.name) for a in report.arrays]
    assert sizes == sorted(sizes, key=lambda one: (-one[0], one[1], one[2]))


def test_a_single_result_has_no_table_of_pointers():
    def fn(x):
        return x * 2

    with sharding.mesh(data=2, devices=2):
        one = sharding.jit(fn).complete(floats(4)).memory()
        two = sharding.jit(lambda x: (fn(x), x + 1)).complete(floats(4)).memory()
    assert (one.result_bytes, two.result_bytes) == (16, 2 * 16 + 2 * 8)
    assert one.by_class["results"] == 16 and two.by_class["results"] == two.result_bytes
    assert one.gap_bytes == two.gap_bytes == 0


def test_a_reshard_is_where_it_is_needed():
    """Not where the array was computed."""

    def fn(x, w):
        rounded = jnp.tanh(w)
        return x @ rounded

    (gather,) = ledger_of(fn, {"a": 4}, floats(64, 16), floats(16, 12), in_shardings=(P("a"), P("a")))
    at = fn.__code__.co_firstlineno
    assert f"test_small_references.py:{at + 2} " in gather.source and gather.kind == "all-gather"
    row = ledger_of(lambda x: x[0] * 2, {"a": 4}, floats(16, 4), in_shardings=P("a"))
    assert [c.source for c in row] == [c.source for c in row if "test_small_references.py" in c.source] != []


def test_arrays_that_no_value_of_the_program_has():
    """The words of random numbers, named by their type, with a line of the program that reads them; and the third array
    of the loop that makes them, which nothing reads."""
    with sharding.mesh(a=2, devices=jax.devices()[:2]):
        key = jax.eval_shape(lambda: jax.random.key(0))
        report = sharding.jit(lambda key: jax.random.normal(key, (64,)).sum()).complete(key).memory()
    words = [a for a in report.arrays if a.op == "threefry2x32"]
    assert [a.name for a in words] == ["uint32[64]"] * 3 and {a.num_bytes for a in words} == {256}
    assert sorted("test_small_references.py" in a.last_source for a in words) == [False, True, True]
