"""Training from disk: the numbers of training in memory, within a budget of memory, and whole after every kill."""

import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.faulty_disk import flip_bit

import sharding
from sharding import P, ShardingError, zero
from sharding.zero.state_files import StateFiles

OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "schedule": optax.lion(optax.linear_schedule(1e-3, 1e-4, 3)),
}


def labelled(key):
    """SGD with momentum whose state is a dict."""

    def update(gradients, state, params=None):
        new = jax.tree.map(lambda m, g: 0.9 * m + g, state[key], gradients)
        return jax.tree.map(lambda m: -0.1 * m, new), {key: new}

    return optax.GradientTransformation(lambda params: {key: jax.tree.map(jnp.zeros_like, params)}, update)


def first(params, x):
    return jnp.tanh(x @ params["w"] + params["b"].reshape(1, -1))


def middle(params, x):
    return jnp.tanh(x @ params)


def last(params, x):
    return params["inner"]["scale"] * (x @ params["w"])


def loss(y, target):
    return jnp.mean((y - target) ** 2)


LAYERS = [first, zero.Tiled(middle), last]


def params():
    generator = np.random.default_rng(0)

    def normal(*shape):
        return generator.normal(size=shape).astype(np.float32) / 4

    return [
        {"w": normal(16, 32), "b": np.zeros(32, np.float32)},
        [normal(32, 24) for _ in range(4)],
        {"w": normal(96, 8), "inner": {"scale": np.float32(1)}},
    ]


def whole(params, x, target):
    x = first(params[0], x)
    x = jnp.concatenate([middle(tile, x) for tile in params[1]], axis=-1)
    return loss(last(params[2], x), target)


def batch(step):
    generator = np.random.default_rng(step)
    return generator.normal(size=(8, 16)).astype(np.float32), generator.normal(size=(8, 8)).astype(np.float32)


def started(folder, tx, tile_bytes=512):
    optimizer = zero.DiskOptimizer(tx, folder, tile_bytes=tile_bytes)
    if optimizer.step is None:
        optimizer.init(params())
    return optimizer, zero.LayerTrainer(optimizer, LAYERS, loss)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_in_memory(tmp_path, name):
    tx = OPTIMIZERS[name]
    optimizer, trainer = started(tmp_path, tx)
    own = jax.tree.map(jnp.asarray, params())
    state = tx.init(own)
    gradient, update = jax.jit(jax.value_and_grad(whole)), jax.jit(tx.update)
    for step in range(5):
        value, gradients = gradient(own, *batch(step))
        updates, state = update(gradients, state, own)
        own = optax.apply_updates(own, updates)
        np.testing.assert_allclose(trainer.step(*batch(step)), value, rtol=1e-5)
        optimizer, trainer = started(tmp_path, tx) if step == 2 else (optimizer, trainer)  # goes on from the files
    assert optimizer.step == 5 and len(optimizer.names) == 8
    for found, expected in zip(optimizer.names, jax.tree.leaves(own), strict=True):
        np.testing.assert_allclose(optimizer.read(found), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tile_bytes", [1, 40])  # a row is the least
def test_an_update_by_given_gradients_is_that_of_optax(tmp_path, tile_bytes):
    tx, own = (
        OPTIMIZERS["adamw"],
        {"a": np.ones((7, 5), np.float32), "b": np.float32(2), "empty": np.ones((0, 3), np.float32)},
    )
    optimizer = zero.DiskOptimizer(tx, tmp_path, tile_bytes=tile_bytes)
    optimizer.init({"a": lambda: own["a"], "b": own["b"], "empty": own["empty"]})
    state, update = tx.init(own), jax.jit(tx.update)
    for step in range(3):
        generator = np.random.default_rng(step)
        gradients = {name: generator.normal(size=x.shape).astype(x.dtype) for name, x in own.items()}
        updates, state = update(gradients, state, own)
        own = optax.apply_updates(own, updates)
        optimizer.update(gradients)
    for name in own:
        np.testing.assert_allclose(optimizer.read(name), own[name], rtol=1e-6)


def test_what_is_read_is_sharded_over_the_mesh(tmp_path):
    with sharding.mesh(data=4, devices=jax.devices()[:4]):
        optimizer, trainer = started(tmp_path / "mesh", OPTIMIZERS["adamw"], tile_bytes=2**20)
        assert optimizer.placed(optimizer.read("0/w")).sharding.spec == P(None, "data")
        found = [float(trainer.step(*batch(step))) for step in range(3)]
    _, trainer = started(tmp_path / "one", OPTIMIZERS["adamw"])
    np.testing.assert_allclose(found, [float(trainer.step(*batch(step))) for step in range(3)], rtol=1e-5)


def test_a_step_that_fails_changes_nothing(tmp_path):
    optimizer, trainer = started(tmp_path, OPTIMIZERS["adamw"])
    before = {name: optimizer.read(name) for name in optimizer.names}
    with pytest.raises(TypeError, match="shape"):
        trainer.step(np.ones((8, 15), np.float32), batch(0)[1])
    with pytest.raises(RuntimeError, match="stop"), optimizer.taking_step() as apply:
        apply({"0/b": np.ones(32, np.float32)})
        raise RuntimeError("stop")
    with pytest.raises(ShardingError, match=r"(?s)x: no such.*0/w: gradient \[3\], parameter \[16, 32\]"):
        optimizer.update({"x": np.ones(3), "0": {"w": np.ones(3)}})
    with pytest.raises(ShardingError, match="not written"):
        optimizer.update({"0": {"b": np.ones(32)}})
    assert optimizer.step == 0 and all(np.array_equal(before[name], optimizer.read(name)) for name in before)
    trainer.step(*batch(0))
    assert optimizer.step == 1


def test_a_damaged_file_is_an_error_before_it_is_used(tmp_path):
    _, trainer = started(tmp_path, OPTIMIZERS["adamw"])
    flip_bit(max(tmp_path.glob("*.0"), key=lambda path: path.stat().st_size))
    with pytest.raises(ShardingError, match="another checksum"):
        trainer.step(*batch(0))


@pytest.mark.parametrize("options", [{"tile_bytes": 0}, {"window": 0}])
def test_no_bytes_or_tiles_are_refused(tmp_path, options):
    with pytest.raises(ShardingError, match="at least 1"):
        zero.DiskOptimizer(optax.sgd(0.1), tmp_path, **options)


def test_optimizers_that_mix_elements_are_refused(tmp_path):
    for tx in (optax.lamb(1e-2), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), optax.adafactor(1e-2)):
        with pytest.raises(ShardingError, match="reduce_sum"):
            zero.DiskOptimizer(tx, tmp_path)
    optimizer, _ = started(tmp_path, OPTIMIZERS["adamw"])
    with pytest.raises(ShardingError, match="the state of step 0"):
        optimizer.init(params())
    with pytest.raises(ShardingError, match="at least 1"):
        zero.DiskOptimizer(OPTIMIZERS["adamw"], tmp_path, window=0)


def test_a_state_of_another_optimizer_is_refused(tmp_path):
    zero.DiskOptimizer(optax.adam(1e-2), tmp_path).init({"w": jnp.ones((4, 2))})
    with pytest.raises(
        ShardingError,
        match=r"w: tuple\(ScaleByAdamState\(\*, \*, \*\), EmptyState\(\)\) of int32\[\], float32\[4, 2\], "
        r"[\s\S]*the optimizer's, for w: tuple\(EmptyState\(\), EmptyState\(\)\) of nothing\n",
    ):
        zero.DiskOptimizer(optax.sgd(1e-2), tmp_path)
    with pytest.raises(ShardingError, match=r"parameters w\s+required: one of \.names"):
        zero.DiskOptimizer(optax.adam(1e-3), tmp_path).read("v")


@pytest.mark.parametrize(
    ("made", "other"),
    [
        (optax.adam(1e-2), optax.adamw(1e-2)),  # weight decay has a state, too, an empty one
        (optax.adam(1e-2), optax.amsgrad(1e-2)),
        (optax.sgd(1e-2, momentum=0.9), optax.rmsprop(1e-2)),
        (optax.lion(1e-2), optax.sgd(optax.linear_schedule(1, 0, 3), momentum=0.9)),
        (optax.adam(1e-2), optax.adam(1e-2, mu_dtype=jnp.bfloat16)),
        (labelled("velocity"), labelled("squares")),
    ],
)
def test_states_of_the_same_shapes_are_told_apart(tmp_path, made, other):
    zero.DiskOptimizer(made, tmp_path).init({"w": jnp.ones((4, 2)), "b": jnp.float32(1)})
    assert zero.DiskOptimizer(made, tmp_path).step == 0
    with pytest.raises(ShardingError, match="also with other hyperparameters"):
        zero.DiskOptimizer(other, tmp_path)


def test_another_learning_rate_continues_a_state(tmp_path):
    optimizer = zero.DiskOptimizer(optax.adamw(1e-2), tmp_path)
    optimizer.init({"w": jnp.ones(4)})
    optimizer.update({"w": jnp.ones(4)})
    again = zero.DiskOptimizer(optax.adamw(0.0, weight_decay=0.1), tmp_path)
    again.update({"w": jnp.ones(4)})
    assert again.step == 2 and np.array_equal(again.read("w"), optimizer.read("w"))


KILLED = """
import os, signal, sys, zlib
sys.path[:0] = {path!r}
from pathlib import Path
import test_layer_streaming as t
folder, steps, moment, left = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), [0]
def counted(f):
    def call(*args, **kw):
        left[0] += 1
        if left[0] == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return f(*args, **kw)
    return call
zlib.crc32, os.fsync, os.posix_fallocate, Path.replace = map(
    counted, (zlib.crc32, os.fsync, os.posix_fallocate, Path.replace))
optimizer, trainer = t.started(folder, t.OPTIMIZERS["adamw"])
for step in range(optimizer.step, steps):
    trainer.step(*t.batch(step))
    print(step + 1, flush=True)
"""


def run(folder, steps, moment=0):
    code = KILLED.format(path=[path for path in sys.path if path] + [str(__file__).rpartition("/")[0]])
    return subprocess.run(
        [sys.executable, "-c", code, str(folder), str(steps), str(moment)], capture_output=True, text=True
    )


def contents(folder):
    optimizer, _ = started(folder, OPTIMIZERS["adamw"])
    files = optimizer.files
    return [part for name, e in files.entries.items() for k in range(len(e.tiles)) for part in files.read(name, k)]


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_loses_nothing(tmp_path, kills):
    """Killed as it computes a checksum, syncs, or replaces the record, in the first step or a later one."""
    steps = 4
    _, trainer = started(tmp_path / "whole", OPTIMIZERS["adamw"])
    for step in range(steps):
        trainer.step(*batch(step))
    calls = 1700  # about those of a whole run
    for k, moment in enumerate(np.random.default_rng(kills).integers(1, calls, kills).tolist()):
        folder = tmp_path / str(k)
        killed = run(folder, steps, moment)
        assert killed.returncode == -signal.SIGKILL
        *_, committed = ["0", *killed.stdout.split()]
        assert int(committed) <= (StateFiles(folder).step or 0) <= int(committed) + 1
        finished = run(folder, steps)
        assert finished.returncode == 0, finished.stderr
        for found, expected in zip(contents(folder), contents(tmp_path / "whole"), strict=True):
            np.testing.assert_array_equal(found, expected)


BUDGET = """
import resource, sys, tempfile
import jax, jax.numpy as jnp, numpy as np, optax
from sharding import zero
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def train(layers, width):
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
        optimizer = zero.DiskOptimizer(optax.adamw(1e-3), folder, tile_bytes=2**19)
        optimizer.init([lambda: np.full((width, width), 1e-3, np.float32) for _ in range(layers)])
        trainer = zero.LayerTrainer(optimizer, [layer] * layers, lambda y, t: jnp.mean((y - t) ** 2))
        x = np.ones((4, width), np.float32)
        losses = [float(trainer.step(x, x)) for _ in range(2)]
        assert losses[1] < losses[0]
        return sum(entry.num_bytes for entry in optimizer.files.entries.values())
def layer(w, x):
    return x + x @ w
train(2, 1024)
before = peak()
num_bytes = train(int(sys.argv[2]), 1024)
print(num_bytes, peak() - before)
"""


@pytest.mark.slow
def test_a_model_of_four_times_the_budget_trains(tmp_path):
    """Parameters and AdamW's moments take four times the memory by which the process may grow."""
    budget, layers = 48 * 2**20, 16
    done = subprocess.run([sys.executable, "-c", BUDGET, str(tmp_path), str(layers)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    num_bytes, growth = map(int, done.stdout.split())
    assert num_bytes >= 4 * budget and growth < budget
