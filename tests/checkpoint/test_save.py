"""Which checkpoints are kept, and what is stored of a state."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding import ShardingError, checkpoint


def small(value: float = 0.0) -> dict[str, jax.Array]:
    return {"a": jnp.full((3,), value, jnp.float32)}


@pytest.mark.parametrize(
    ("figures", "kept"),
    [
        ([5, 1, 3, 4, 2], [1, 3, 4]),
        ([1, 2, 3, 4, 5], [0, 3, 4]),
        ([5, 4, 3, 2, 1], [3, 4]),
        ([2, 2, 3, 4, 4], [1, 3, 4]),
        ([None, 2, None, None, None], [1, 3, 4]),
        ([None] * 5, [3, 4]),
    ],
    ids=str,
)
def test_newest_and_best_are_kept(figures, kept, tmp_path):
    with checkpoint.Saver(tmp_path, keep=2) as saver:
        for step, figure in enumerate(figures):
            saver.save(step, small(step), figure=figure)
    assert checkpoint.steps(tmp_path) == kept
    known = {step: figures[step] for step in kept if figures[step] is not None}
    assert checkpoint.figures(tmp_path) == known
    assert checkpoint.best_step(tmp_path) == (min(kept, key=lambda s: (known.get(s, 9), -s)) if known else None)
    np.testing.assert_array_equal(checkpoint.restore(tmp_path, small(), kept[0])["a"], np.full(3, kept[0]))


def test_best_of_an_earlier_saver_is_kept(tmp_path):
    with checkpoint.Saver(tmp_path, keep=1) as saver:
        saver.save(0, small(), figure=1.0)
    with checkpoint.Saver(tmp_path, keep=1) as saver:
        saver.save(1, small(), figure=2.0)
        saver.save(2, small(), figure=3.0)
    assert checkpoint.steps(tmp_path) == [0, 2]


def test_best_is_not_kept_without_keep_best(tmp_path):
    with checkpoint.Saver(tmp_path, keep=1, keep_best=False) as saver:
        for step in range(3):
            saver.save(step, small(), figure=float(step))
    assert checkpoint.steps(tmp_path) == [2]


def test_nothing_else_is_left_in_the_directory(tmp_path):
    (tmp_path / "7.orbax-checkpoint-tmp-1").mkdir()
    with checkpoint.Saver(tmp_path, keep=1) as saver:
        for step in range(3):
            saver.save(step, small())
    assert os.listdir(tmp_path) == ["2"]


def test_existing_step_is_left_unchanged(tmp_path):
    for value in (1, 2):
        checkpoint.save(tmp_path, 0, small(value)).wait()
    np.testing.assert_array_equal(checkpoint.restore(tmp_path, small())["a"], [1, 1, 1])


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ShardingError, match="required: keep >= 1"):
        checkpoint.Saver(tmp_path, keep=0)


def test_one_error_lists_all_non_array_leaves(tmp_path):
    with pytest.raises(ShardingError, match="required: jax.Array leaves") as caught:
        checkpoint.save(tmp_path, 0, {"a": 1, "b": small(), "c": "x"})
    assert "a: int" in str(caught.value) and "c: str" in str(caught.value) and "b" not in caught.value.found
    assert checkpoint.steps(tmp_path) == []


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_are_restored(impl: str, tmp_path):
    key = jax.random.key(3, impl=impl)
    state = {"one": key, "many": jax.random.split(key, 4)}
    checkpoint.save(tmp_path, 0, state).wait()
    restored = checkpoint.restore(tmp_path, state)
    for name in state:
        assert restored[name].dtype == state[name].dtype
        np.testing.assert_array_equal(jax.random.key_data(restored[name]), jax.random.key_data(state[name]))
    np.testing.assert_array_equal(jax.random.normal(restored["one"], (5,)), jax.random.normal(key, (5,)))
    assert set(checkpoint.restore_named(tmp_path)) == {"one", "many"}


def test_describe(tmp_path):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    array = jax.device_put(jnp.zeros((8, 4, 2), jnp.bfloat16), NamedSharding(mesh, P(("data", "tensor"), None)))
    checkpoint.save(tmp_path, 4, {"x": {"y": array}, "z": jnp.zeros((), jnp.int32)}, {"k": 1}, figure=0.5).wait()
    shown = checkpoint.describe(tmp_path)
    assert (shown.step, shown.extra, shown.figure, shown.num_bytes) == (4, {"k": 1}, 0.5, 132)
    first, second = shown.arrays
    assert (first.name, first.shape, first.dtype, first.num_bytes) == ("x/y", (8, 4, 2), "bfloat16", 128)
    assert first.spec is not None and first.spec[:1] == (("data", "tensor"),) and not any(first.spec[1:])
    assert (second.name, second.spec) == ("z", None)
    assert 132 < shown.disk_bytes < 100_000


def test_restore_by_prefix(tmp_path):
    checkpoint.save(tmp_path, 0, {"params": {"w": jnp.arange(3)}, "step": jnp.int32(1)}).wait()
    assert list(checkpoint.restore_named(tmp_path, prefix="params/")) == ["params/w"]
    with pytest.raises(ShardingError, match="params/..., step/..."):
        checkpoint.restore_named(tmp_path, prefix="weights/")
