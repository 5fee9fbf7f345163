"""Completions kept on disk beside JAX's compilation cache: found again, and only for the same program."""

import json
import os
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from support.process_groups import Launched

import sharding
from sharding import P, propagation
from sharding.jit import disk_cache, program_digest
from sharding.rewrite import op_strategy, reshard

SETTINGS = {
    "jax_compilation_cache_dir": None,
    "jax_enable_compilation_cache": True,
    "jax_compilation_cache_max_size": -1,
    "jax_persistent_cache_min_compile_time_secs": 1.0,
}
"""With JAX's defaults."""

X, W = jax.ShapeDtypeStruct((16, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")


@pytest.fixture
def folder(tmp_path):
    """The folder of the entries, with JAX's cache on and all completions worth keeping."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield tmp_path / disk_cache.FOLDER
    for name, value in SETTINGS.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def loss(w, x):
    def layer(h, _):
        return sharding.annotate(jnp.tanh(h @ w), P("data", "tensor"), name="hidden"), None

    h, _ = jax.lax.scan(layer, x, None, length=3)
    return (h[:, ::-1].sum(0) * jnp.sort(h, axis=1).sum()).sum()


def step(w, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    return w - 0.1 * gradient, value


def jitted(f=step, **options):
    """As in a process that has not seen the function."""
    given = {"in_shardings": (P("data", "tensor"), P("data")), "donate_argnums": (0,), **options}
    return sharding.jit(lambda w, x: f(w, x), **given)


def entries(folder):
    return sorted(folder.glob("*.json.z")) if folder.exists() else []


def refuse(*args, **kwargs):
    raise AssertionError("searched again")


@pytest.fixture
def no_search(monkeypatch):
    """Propagation, and searches of how ops run and are resharded, are errors."""

    def forbid():
        monkeypatch.setattr(propagation, "complete", refuse)
        monkeypatch.setattr(op_strategy._StrategySearch, "cheapest", refuse)
        monkeypatch.setattr(reshard, "_chain", refuse)

    yield forbid
    monkeypatch.undo()


def facts(c):
    """All that a completion says."""
    names = list(c.assignment.graph.names)
    return [
        str(c), str(c.communication()), str(c.memory()), str(c.conflicts), str(c.in_shardings), str(c.out_shardings),
        str(c.explicit()), c.unreduced, *(str(c.why(name)) for name in names),
        str(c.annotate("hidden", P(("data",), "tensor")).communication()),
    ]  # fmt: skip


@pytest.mark.parametrize("policy", ["storage", "shardy"])
def test_the_second_time_nothing_is_searched_and_all_is_the_same(folder, no_search, monkeypatch, policy):
    with sharding.mesh(data=2, tensor=4):
        first = jitted(policy=policy)
        before, text = first.complete(W, X), first.lower(W, X).as_text()
        assert len(entries(folder)) == 1
        no_search()
        second = jitted(policy=policy)
        after = second.complete(W, X)
        assert second.lower(W, X).as_text() == text
        assert after.assignment.specs == before.assignment.specs
        monkeypatch.undo()
        # A completion that was made from the start, not restored, says the same.
        assert facts(after) == facts(before)
        assert len(entries(folder)) == 1


def fully_sharded(w, x):
    """A step whose batch has the axis over which the parameter is stored."""
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w.T) ** 2))(w)


@pytest.mark.parametrize("stored", [P("data"), P(None, "data"), P("data", "tensor"), P("tensor")])
def test_what_counts_as_storage_is_kept(folder, no_search, monkeypatch, stored):
    def completed():
        large = jax.ShapeDtypeStruct((256, 64), "float32")
        return jitted(fully_sharded, in_shardings=(stored, P("data"))).complete(W, large)

    def said(c):
        dims = {v: [*one.spec.dims] for v, one in c.assignment.graph.annotations.items()}
        priorities = {v: [(dim.priority, dim.is_stored) for dim in of] for v, of in dims.items()}
        return dims, priorities, [str(c.why(name)) for name in ("w", "x", "out")], str(c.explicit())

    with sharding.mesh(data=2, tensor=4):
        before = said(completed())
        no_search()
        restored = completed()
        monkeypatch.undo()
        assert said(restored) == before
    assert any("stored so" in text for text in before[2]) == ("data" in stored)


def test_numbers_are_those_of_one_device(folder, no_search):
    w, x = (np.random.default_rng(0).normal(scale=0.1, size=s.shape).astype("float32") for s in (W, X))
    with sharding.mesh(data=1, tensor=1, devices=jax.devices()[:1]):
        expected = jax.jit(step)(w, x)
    with sharding.mesh(data=2, tensor=4):
        found = jitted()(w, x)
        no_search()
        again = jitted()(w, x)
    for one, two, other in zip(*(map(np.asarray, results) for results in (found, again, expected)), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)
        np.testing.assert_array_equal(one, two)


PROGRAM = """
    import sys, jax
    jax.config.update("jax_num_cpu_devices", 8)
    sys.path.insert(0, sys.argv[1])
    import sharding
    from sharding.rewrite import op_strategy, reshard
    from sharding import propagation
    from jit.test_saved_completion import jitted, X, W
    searched = []
    for place, name in ((propagation, "complete"), (op_strategy._StrategySearch, "cheapest")):
        def counted(*args, name=name, real=getattr(place, name), **kwargs):
            searched.append(name)
            return real(*args, **kwargs)
        setattr(place, name, counted)
    with sharding.mesh(data=2, tensor=4):
        text = jitted().lower(W, X).as_text()
    print(len(searched), reshard._chain.cache_info().misses, __import__("zlib").crc32(text.encode()))
"""


def test_another_process_searches_nothing(tmp_path):
    tests = os.path.dirname(os.path.dirname(__file__))
    settings = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    found = []
    for seed in ("1", "2"):
        environment = {**os.environ, **settings, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": seed, "PYTHONPATH": tests}
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), tests]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.append([*map(int, run.stdout.split())])
    (searched, chains, text), again = found
    assert searched > 10 and chains > 0 and again == [0, 0, text]


def other(w, x):
    return step(w, x * 2)


OTHERS = {
    "shapes": lambda: jitted().complete(W, jax.ShapeDtypeStruct((32, 64), "float32")),
    "dtypes": lambda: jitted().complete(*(jax.ShapeDtypeStruct(s.shape, "bfloat16") for s in (W, X))),
    "program": lambda: jitted(other).complete(W, X),
    "annotations": lambda: jitted(in_shardings=(P("data"), P("data"))).complete(W, X),
    "results": lambda: jitted(out_shardings=(P(None, "data"), None)).complete(W, X),
    "donation": lambda: jitted(donate_argnums=()).complete(W, X),
    "policy": lambda: jitted(policy="shardy").complete(W, X),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_program_is_another_entry(folder, what):
    with sharding.mesh(data=2, tensor=4):
        jitted().complete(W, X)
        OTHERS[what]()
    assert len(entries(folder)) == 2


def test_another_mesh_or_version_is_another_entry(folder, monkeypatch):
    for sizes in ({"data": 2, "tensor": 4}, {"data": 4, "tensor": 2}, {"tensor": 4, "data": 2}):
        with sharding.mesh(sizes):
            jitted().complete(W, X)
    with sharding.mesh(data=2, tensor=4, devices="h100:8"):
        jitted().complete(W, X)
    monkeypatch.setattr(program_digest, "library", lambda: "another")
    with sharding.mesh(data=2, tensor=4):
        jitted().complete(W, X)
    assert len(entries(folder)) == 5


def test_other_constants_and_lines_are_the_same_entry(folder):
    with sharding.mesh(data=2, tensor=4):
        for value in (1.0, 2.0):
            table = np.full((16, 64), value, "float32")
            c = jitted(lambda w, x, table=table: (w, (x @ w + table).sum())).complete(W, X)
            assert c.spec("x") == P("data")
    assert len(entries(folder)) == 1


@pytest.mark.parametrize("off", [
    {"jax_enable_compilation_cache": False},
    {"jax_compilation_cache_dir": None},
    {"jax_compilation_cache_max_size": 0},
    {"jax_persistent_cache_min_compile_time_secs": 3600.0},
    {"jax_compilation_cache_max_size": 10},
])  # fmt: skip
def test_settings_of_jax_turn_it_off(folder, off):
    for name, value in off.items():
        jax.config.update(name, value)
    with sharding.mesh(data=2, tensor=4):
        jitted().complete(W, X)
    assert not entries(folder)


@pytest.mark.parametrize("engine", ["shardy", "xla"])
def test_other_engines_keep_nothing(folder, engine):
    with sharding.mesh(data=2, tensor=4):
        jitted(engine=engine).complete(W, X)
    assert not entries(folder)


def other_specs(data):
    entry = disk_cache._unpacked(data)
    return disk_cache._packed({**entry, "specs": entry["specs"][1:]})


def of_another_rank(data):
    entry = disk_cache._unpacked(data)
    return disk_cache._packed({**entry, "values": [0] * len(entry["values"])})


@pytest.mark.parametrize("damage", [
    lambda data: b"", lambda data: data[:-7], lambda data: data[:40] + b"x" + data[41:], lambda data: b"no entry" * 9,
    lambda data: disk_cache._packed({"unknown": 1}), other_specs, of_another_rank,
])  # fmt: skip
def test_a_damaged_entry_is_ignored_and_written_anew(folder, damage):
    with sharding.mesh(data=2, tensor=4):
        jitted().lower(W, X)
        (path,) = entries(folder)
        data = path.read_bytes()
        path.write_bytes(damage(data))
        with pytest.warns(UserWarning, match="ignored and written anew"):
            jitted().lower(W, X)
        assert disk_cache._unpacked(path.read_bytes()) == disk_cache._unpacked(data)
        jitted().complete(W, X)


def test_a_folder_that_cannot_be_written(folder):
    folder.write_text("a file")
    with sharding.mesh(data=2, tensor=4), pytest.warns(UserWarning, match="a completion is not cached"):
        c = jitted().complete(W, X)
    assert c.spec("hidden") == P("data", "tensor")


def test_the_least_recently_used_entries_are_removed(folder):
    disk_cache.write("a", list(range(1000)))
    size = entries(folder)[0].stat().st_size
    jax.config.update("jax_compilation_cache_max_size", 3 * size)
    for k, name in enumerate("bc"):
        disk_cache.write(name, list(range(1000)))
        os.utime(folder / f"{name}.json.z", (k, k))
    assert disk_cache.read("b") == list(range(1000))  # now c is the least recently used
    disk_cache.write("d", list(range(1000)))
    disk_cache.write("d", list(range(1000)))
    assert [path.name[0] for path in entries(folder)] == ["a", "b", "d"]


def test_files_of_killed_processes_are_removed(folder):
    jax.config.update("jax_compilation_cache_max_size", 10_000)
    disk_cache.write("a", [])
    old, new = folder / "b-1.tmp", folder / "b-2.tmp"
    old.touch()
    new.touch()
    past = time.time() - 2 * disk_cache.STALE_SECONDS
    os.utime(old, (past, past))
    disk_cache.write("c", [])
    assert sorted(path.name for path in folder.iterdir()) == ["a.json.z", "b-2.tmp", "c.json.z"]


def test_many_read_and_write_one_entry(folder):
    jax.config.update("jax_compilation_cache_max_size", 10_000)
    failures = []

    def work(k):
        try:
            for n in range(30):
                disk_cache.write(f"key{n % 5}", [n % 5] * 3000)
                found = disk_cache.read(f"key{(n + k) % 5}")
                assert found in (None, [(n + k) % 5] * 3000)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not [path for path in folder.iterdir() if path.suffix == ".tmp"]


def test_entries_are_plain_values(folder):
    with sharding.mesh(data=2, tensor=4):
        jitted().lower(W, X)
    (path,) = entries(folder)
    entry = disk_cache._unpacked(path.read_bytes())
    assert json.loads(json.dumps(entry)) == entry


SCRIPT = """
import sys

import jax
import numpy as np

import sharding
from sharding import P, propagation

sharding.initialize()
number = jax.process_index()
jax.config.update("jax_compilation_cache_dir", f"{sys.argv[1]}/{number}")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
made, real = [], propagation.complete
propagation.complete = lambda *args, **kwargs: made.append(0) or real(*args, **kwargs)

@sharding.jit(in_shardings=(P("data", "tensor"), P("data")), out_shardings=P())
def step(w, x):
    return (x @ w).sum()

with sharding.mesh(data=2, tensor=2):
    loss = float(step(np.ones((8, 8)), np.ones((4, 8))))
    print(f"process {number} made {len(made)} of loss {loss}")
"""


@pytest.mark.slow
def test_processes_that_find_an_entry_agree_with_those_that_do_not(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    texts = []
    for k in range(2):
        options = ["--processes", "2", "--devices-per-process", "2", "--all-lines"]
        command = ["launch", *options, "--", str(script), str(tmp_path)]
        with Launched(args=command, folder=tmp_path / f"run-{k}") as launched:
            assert launched.wait_for_exit() == 0, launched.text
        texts.append(launched.text)
    assert all(f"process {number} made 1 of loss 256.0" in texts[0] for number in (0, 1))
    # Only process 0 has written; each process of this test has a folder of its own.
    assert "process 0 made 0 of loss 256.0" in texts[1] and "process 1 made 1 of loss 256.0" in texts[1]
