"""Restoring onto other meshes, and errors for other arrays than were saved."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.faulty_disk import flip_bit, largest_file

import sharding
from sharding import ShardingError, checkpoint


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    params: Any
    opt_state: Any
    step: Any


def mesh(*shape: int) -> jax.sharding.Mesh:
    names = ("data", "tensor")[: len(shape)]
    return jax.make_mesh(
        shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=jax.devices()[: np.prod(shape)]
    )


def state(on: jax.sharding.Mesh | None = None, seed: int = 0) -> State:
    params = nnx.state(nnx.Linear(16, 8, rngs=nnx.Rngs(seed)), nnx.Param)
    unsharded = State(params, optax.adam(1e-3).init(params), jnp.int32(7))
    return unsharded if on is None else jax.tree.map(lambda x: jax.device_put(x, sharding_on(on, x)), unsharded)


def sharding_on(on: jax.sharding.Mesh, leaf: Any) -> NamedSharding:
    return NamedSharding(on, P(*on.axis_names) if leaf.ndim == 2 else P())


def shapes(on: jax.sharding.Mesh, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_on(on, leaf)), tree)


def assert_equal(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("after", [(2, 4), (8,), (4, 2), (1,), (2,)], ids=str)
def test_restored_on_another_mesh(after: tuple[int, ...], tmp_path):
    before = state(mesh(2, 4))
    checkpoint.save(tmp_path, 3, before, {"note": "x"}).wait()
    restored = checkpoint.restore(tmp_path, shapes(mesh(*after), before))
    assert_equal(restored, before)
    assert restored.params["kernel"].sharding.is_equivalent_to(sharding_on(mesh(*after), jnp.zeros((16, 8))), 2)


def test_extra_and_steps(tmp_path):
    assert checkpoint.latest_step(tmp_path / "none") is None
    for step in (1, 2, 5):
        checkpoint.save(tmp_path, step, {"a": jnp.full((3,), step)}, {"step": step}).wait()
    assert checkpoint.latest_step(tmp_path) == 5
    assert checkpoint.extra(tmp_path) == {"step": 5}
    assert checkpoint.extra(tmp_path, 2) == {"step": 2}
    np.testing.assert_array_equal(checkpoint.restore(tmp_path, {"a": jnp.zeros((3,), jnp.int32)}, 1)["a"], [1, 1, 1])


def test_only_the_newest_are_kept(tmp_path):
    for step in range(5):
        checkpoint.save(tmp_path, step, {"a": jnp.zeros(3)}, keep=2).wait()
    with pytest.raises(ShardingError, match="steps 3, 4"):
        checkpoint.extra(tmp_path, 0)


def test_state_may_be_donated_while_it_is_saved(tmp_path):
    before = {"a": jnp.arange(1 << 16, dtype=jnp.float32)}
    expected = np.asarray(before["a"]).copy()
    saving = checkpoint.save(tmp_path, 0, before)
    jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0, tree), donate_argnums=(0,))(before)
    saving.wait()
    np.testing.assert_array_equal(checkpoint.restore(tmp_path, {"a": jnp.zeros_like(expected)})["a"], expected)


@pytest.mark.parametrize(
    "dtype",
    [*"bool int8 uint16 bfloat16 float32 int32 int4 uint2 float4_e2m1fn float8_e4m3fn float8_e4m3 complex64".split()],
)
def test_dtypes(dtype: str, tmp_path):
    before = {"a": (jnp.arange(12) % 4).reshape(3, 4).astype(dtype), "scalar": jnp.ones((), dtype)}
    checkpoint.save(tmp_path, 0, before).wait()
    assert_equal(checkpoint.restore(tmp_path, before), before)
    with sharding.mesh(data=2, tensor=4):  # not that of the arrays
        assert_equal(checkpoint.restore_named(tmp_path), before)
    assert checkpoint.verify(tmp_path) == {0: ""}


def test_names_are_paths():
    names = checkpoint.named_leaves(state())
    assert {"params/kernel", "params/bias", "opt_state/0/mu/kernel", "step"} <= set(names)


def test_one_error_lists_all_differences(tmp_path):
    checkpoint.save(tmp_path, 0, {"a": jnp.zeros(3), "b": jnp.zeros(3), "c": jnp.zeros(3)}).wait()
    like = {"a": jnp.zeros(4), "b": jnp.zeros(3, jnp.bfloat16), "d": jnp.zeros(1)}
    with pytest.raises(ShardingError, match="names, shapes and dtypes") as caught:
        checkpoint.restore(tmp_path, like)
    message = str(caught.value)
    assert "a: saved as float32[3], requested float32[4]" in message
    assert "b: saved as float32[3], requested bfloat16[3]" in message
    assert "c: only in the checkpoint" in message
    assert "d: not in the checkpoint" in message


def test_no_checkpoint(tmp_path):
    with pytest.raises(ShardingError, match="no checkpoint"):
        checkpoint.restore(tmp_path, {"a": jnp.zeros(3)})


def test_flipped_bit_is_detected(tmp_path):
    # Random bits do not compress, so the middle of the largest file belongs to an array.
    noise = {"a": jax.random.bits(jax.random.key(0), (1 << 16,), jnp.uint32)}
    for step in (1, 2):
        checkpoint.save(tmp_path, step, noise).wait()
    flip_bit(largest_file(tmp_path / "2"))
    with pytest.raises(ShardingError, match="step 1, the newest older checkpoint"):
        checkpoint.restore(tmp_path, noise, 2)
    with pytest.warns(UserWarning, match="step 2 in .* is corrupted .*checksum mismatch: a.*: restored step 1"):
        assert_equal(checkpoint.restore(tmp_path, noise), noise)
