"""A checkpoint saved by any number of processes is restored bit for bit by any other number, on any mesh."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support.process_groups import Launched

from sharding import checkpoint

SCRIPT = """
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import sharding
from sharding import P, checkpoint

sharding.initialize()
mesh, saved, *others = json.loads(sys.argv[1]), *sys.argv[2:]
random = np.random.default_rng(0)
values = {
    "w": random.standard_normal((8, 12)).astype(np.float32),
    "half": np.asarray(jnp.asarray(random.standard_normal((4, 8)), jnp.bfloat16)),
    "count": np.int32(7),
    "mask": random.random((8,)) < 0.5,
    "bytes": random.integers(0, 256, (4, 4), np.uint8),
}
first, last = list(mesh)[0], list(mesh)[-1]
replicated = {"count": P(), "bytes": P()}
specs = {"w": P(first, last if last != first else None), "half": P(None, last), "mask": P(first)} | replicated
with sharding.mesh(mesh) as over:
    shardings = {name: jax.sharding.NamedSharding(over, spec) for name, spec in specs.items()}

    def array(name):
        return jax.make_array_from_callback(values[name].shape, shardings[name], lambda index: values[name][index])

    if saved != "-":
        with checkpoint.Saver(saved) as saver:
            saver.save(3, {name: array(name) for name in values}, {"saved": "by " + sys.argv[1]})
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[name]) for name, x in values.items()}
    for folder in others:
        found = checkpoint.restore(folder, like)
        for name, array in found.items():
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), values[name][shard.index])
        assert checkpoint.verify(folder) == {3: ""}
        for name, array in checkpoint.restore_named(folder).items():
            np.testing.assert_array_equal(array, values[name])  # whole, in each process
        print("same", folder)
"""

SETUPS = [
    (1, '{"data": 4}'),
    (1, '{"data": 2, "tensor": 2}'),
    (2, '{"data": 4}'),
    (2, '{"tensor": 2, "data": 2}'),
    (4, '{"fsdp": 4}'),
    (4, '{"data": 2, "fsdp": 2}'),
]


@pytest.mark.slow
def test_every_setup_restores_every_checkpoint(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(setup: int, *arguments: str) -> str:
        processes, mesh = SETUPS[setup]
        options = ["--processes", str(processes), "--devices-per-process", str(4 // processes), "--all-lines"]
        command = ["launch", *options, "--", str(script), mesh, *arguments]
        with Launched(args=command, folder=tmp_path / f"{setup}-{len(arguments)}") as launched:
            assert launched.wait_for_exit() == 0, launched.text
        return launched.text

    folders = [str(tmp_path / f"saved-{setup}") for setup in range(len(SETUPS))]
    for setup, folder in enumerate(folders):
        run(setup, folder)
    for setup, (processes, _) in enumerate(SETUPS):
        text = run(setup, "-", *folders)
        assert all(text.count(f"same {folder}\n") == processes for folder in folders), text


def test_without_a_mesh_arrays_are_on_a_device_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those of another one could not be read, and a good checkpoint would count as corrupted."""
    with checkpoint.Saver(tmp_path) as saver:
        saver.save(1, {"w": jnp.arange(3.0), "key": jax.random.key(0)})
    own = jax.devices()[3:5]
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: own)
    found = checkpoint.restore_named(tmp_path)
    assert {device for array in found.values() for device in array.devices()} == {own[0]}
    assert checkpoint.verify(tmp_path) == {1: ""}
