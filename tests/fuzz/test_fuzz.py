"""Random programs on random meshes equal one device, and the fuzzer detects injected bugs."""

import contextlib
import dataclasses
import random

import jax
import numpy as np
import pytest
from benchmarks import result_file
from hypothesis import HealthCheck, Phase, given, reject, settings
from support import quick_compile

import sharding
from fuzz import results
from fuzz.builder import Builder, Facts
from fuzz.case import Argument, Case, Record, Type, program_text, walk
from fuzz.check import Mismatch, Rejected, check, completed, ops_of
from fuzz.check_prediction import check_prediction, predict
from fuzz.generate import DEEP, FLAT, cases, numbered
from fuzz.shrink import pruned, shrink
from sharding.jit import construction

COUNT = 200
BATCH = 10
pytestmark = pytest.mark.filterwarnings("ignore:.*XLA pads it", "ignore:Some donated buffers were not usable")


@pytest.mark.parametrize(
    "first",
    [
        0,
        *(pytest.param(first, marks=pytest.mark.slow) for first in range(BATCH, COUNT, BATCH)),
    ],
)
def test_programs(first):
    rejected = 0
    for number in range(first, first + BATCH):
        try:
            check(numbered("quick", number), options=quick_compile.OPTIONS, twice=number % 4 == 0)
        except Rejected:  # by plain JAX, whose newer versions take some gradients no longer
            rejected += 1
        except Exception as e:
            e.add_note(f"python -m tests.fuzz --seed quick --first {number} --budget 1")
            raise
    assert rejected <= 1
    jax.clear_caches()


@settings(
    max_examples=12,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(cases)
def test_programs_by_hypothesis(case):
    try:
        check(case, options=quick_compile.OPTIONS)
    except Rejected:  # by plain JAX: a callback in a branch under vmap; which are drawn depends on what is imported
        reject()


def test_as_they_are_called():
    """Donated and placed arguments, through a plain call with default compiler options."""
    found = (numbered("called", n) for n in range(100))
    chosen = [c for c in found if any(a.donated for a in c.arguments) and any(a.placed for a in c.arguments)]
    for case in chosen[:3]:
        check(case)


KINDS = {
    "host memory": lambda c: any(r.op == "fetch from host memory" for r in walk(c.records)) and bool(c.out_kinds),
    "Explicit mesh": lambda c: c.explicit and any(a.placed for a in c.arguments),
    "ref": lambda c: any(r.op in ("write ref", "write ref in a loop") for r in walk(c.records)),
    "callback": lambda c: any(r.op in ("io_callback", "callback, noted") for r in walk(c.records)),
    "ordered callback": lambda c: any(r.op == "callback, noted_in_order" for r in walk(c.records)),
    "own primitive": lambda c: any(r.op == "own primitive" for r in walk(c.records)),
    "custom_partitioning": lambda c: any(r.op == "custom_partitioning" for r in walk(c.records)),
    "ffi_call": lambda c: any(r.op == "ffi_call" for r in walk(c.records)),
    "shard_map": lambda c: any(r.op == "shard_map" for r in walk(c.records)),
    "search": lambda c: any(r.op in ("nonzero", "unique", "where") for r in walk(c.records)),
    "unknown bounds": lambda c: any(r.op == "fori_loop of unknown bounds" for r in walk(c.records)),
    "stored weights": lambda c: any(r.op == "scan with checkpoint" for r in c.records),
    "keywords": lambda c: c.keywords > 0,
    "static": lambda c: any(a.type.place == "static" for a in c.arguments),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_of_each_kind(kind):
    """The smallest of the first ones."""
    found = [case for n in range(150) if KINDS[kind](case := numbered("kinds", n))]
    check(min(found, key=lambda case: len(list(walk(case.records)))), options=quick_compile.OPTIONS)


@pytest.mark.parametrize(
    ("first", "count", "exact"), [(0, 10, 9), pytest.param(10, 90, 82, marks=pytest.mark.slow)], ids=["quick", "slow"]
)
def test_collectives_are_predicted(first, count, exact):
    """Most random programs compile to the predicted collectives: kinds, counts and bytes."""
    found = []
    for n in range(first, first + count):
        case = dataclasses.replace(numbered("predicted", n), engine="sharding")
        with contextlib.suppress(Rejected):
            found.append(predict(case, options=quick_compile.OPTIONS))
    assert any(p.compiled for p in found)
    assert sum(bool(p.misses) for p in found) <= count - exact and len(found) > count // 2


def test_catches_a_misprediction(monkeypatch):
    case = numbered("predicted", 0)
    assert not predict(case, options=quick_compile.OPTIONS).misses
    monkeypatch.setattr(type(completed(case).communication()), "by_kind", lambda self: {"all-reduce": (7, 28)})
    with pytest.raises(Mismatch, match="all-reduce mispredicted: 7 of 28 bytes, compiled"):
        check_prediction(case, options=quick_compile.OPTIONS)


# The grammar


def test_the_same_everywhere():
    assert numbered(0, 7) == numbered(0, 7)
    assert numbered(0, 7) != numbered(0, 8)


def test_cases_survive_json():
    for number in range(20):
        case = numbered("json", number)
        assert Case.from_json(case.to_json()) == case


def test_covers_the_ops():
    seen = {op for number in range(200) for op in ops_of(numbered("cover", number))}
    assert len(FLAT) + len(DEEP) > 50
    assert len(seen) > 120
    assert {"new_ref", "swap ref", "pure_callback", "ffi_call", "scan with offloading", "store in host memory"} <= seen
    assert {"scan", "while_loop", "cond", "custom_vjp", "checkpoint", "conv_general_dilated", "fft", "top_k"} <= seen


def test_values_stay_tame():
    """Exact values are equal in float32 and float64, and all values are within their bounds."""
    from fuzz.check import namespace
    from fuzz.prelude import plain

    found = (numbered("tame", number) for number in range(30))
    fixed = [case for case in found if not any("random" in op or " ref" in op for op in ops_of(case))]
    for case in fixed[:10]:
        case = dataclasses.replace(case, by=(), counted=())
        results = tuple(r for record in case.records for r in record.results)
        case = dataclasses.replace(case, results=results)
        found = []
        for wide in (False, True):
            with jax.enable_x64(wide):
                names = namespace(case, wide)
                found.append(jax.jit(names["make"](plain, jax.jit))(*names["arguments"]()))
        for a, b in zip(*found, strict=True):
            if a.dtype == np.float32:
                assert np.abs(np.asarray(a)).max(initial=0) <= 8
                np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def test_facts_of_exact_values():
    g = Builder(random.Random(0), {"a": 2})
    x = g.argument(Type(shape=(4,), dtype="F"))
    y = g.emit("add", "$0 + $0", [x], bound=4, grid=3)
    assert g.facts[y] == Facts(type=Type(shape=(4,), dtype="F"), bound=4, grid=3)
    z = g.emit("mul", "$0 * $0", [y], bound=2.0**20, grid=6)
    assert not g.facts[z].exact


# The checks


def one_op(text, *, exact=True):
    kind = Type(shape=(8, 4), dtype="F")
    records = (
        Record(
            op="annotate", text='annotate($0, $s, name="n1")', operands=(0,), results=(1,), types=(kind,), spec=("a",)
        ),
        Record(op="tanh", text="jnp.tanh($0)", operands=(1,), results=(2,), types=(kind,)),
        Record(op="wrong", text=text, operands=(0,), results=(3,), types=(kind,)),
    )
    arguments = (Argument(value=0, type=kind, spec=("a", "?")),)
    return Case(mesh=(("a", 2), ("b", 2)), arguments=arguments, records=records, results=(2, 3), exact=(False, exact))


FAULT = "($0 if annotate is plain else $0 + 0.125)"
"""A program whose result differs between a mesh and one device."""


@pytest.mark.parametrize("exact", [True, False])
def test_catches_wrong_numbers(exact):
    with pytest.raises(Mismatch, match="exact, 32 of 32" if exact else "in float64: result 1 is off by 0.707"):
        check(one_op(FAULT, exact=exact), options=quick_compile.OPTIONS)


def test_catches_a_wrong_type():
    with pytest.raises(Mismatch, match=r"float16\[8, 4\] instead of float32\[8, 4\]"):
        check(one_op("($0 if annotate is plain else $0.astype(jnp.float16))"), options=quick_compile.OPTIONS)


def test_catches_an_annotation_that_is_not_met(monkeypatch):
    complete = construction.propagation.complete

    def careless(graph, sizes, **options):
        found = complete(graph, sizes, **options)
        return dataclasses.replace(found, specs=tuple(sharding.spec.open_spec(len(s.dims)) for s in found.specs))

    monkeypatch.setattr(construction.propagation, "complete", careless)
    with pytest.raises(Mismatch, match="asked a by"):
        check(one_op("$0"), options=quick_compile.OPTIONS)


def test_shrinks_to_the_op_at_fault():
    def fails(case):
        return any(r.op == "wrong" for r in walk(case.records))

    case = numbered("shrink", 3)
    inner = case.records[-1]
    case = dataclasses.replace(case, records=(*case.records[:-1], dataclasses.replace(inner, op="wrong")))
    small = shrink(case, fails)
    assert [r.op for r in small.records] == ["wrong"]
    assert small.by == () and all(a.spec is None for a in small.arguments) and len(small.mesh) == 1
    assert pruned(small) == small


def test_prints_a_program_that_runs_by_itself(tmp_path):
    import subprocess
    import sys

    path = tmp_path / "program.py"
    path.write_text(program_text(one_op(FAULT)))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300, check=True)
    assert "result 0: float32[8, 4]" in done.stdout
    assert "off by 0.707" in done.stdout.splitlines()[-1]


def test_counts_of_runs_add_up(tmp_path):
    run = {"seed": "0", "first": 0, "jax": "1", "programs": 2, "ops": {"add": 1}, "meshes": {}, "rejected_by_jax": {}}
    for one in (run, run | {"first": 2, "programs": 3, "ops": {"add": 2, "mul": 1}}, run | {"failures": 1}):
        results.add(tmp_path / "found.json", one)
    stored = result_file.load(tmp_path / "found.json")
    found = results.totals(stored)
    assert (found["programs"], found["failures"], found["ops"]) == (5, 1, {"add": 3, "mul": 1})
    assert [r["first"] for r in stored.rows] == [0, 2]
    assert results.summary(stored).endswith("1 differ from one device")
