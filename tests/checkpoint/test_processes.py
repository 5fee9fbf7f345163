"""What any number of processes saved on any mesh, any other number restores on any other mesh, bit for bit."""

from pathlib import Path

import pytest
from groups import Launched

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
whole = {"count": P(), "bytes": P()}
specs = {"w": P(first, last if last != first else None), "half": P(None, last), "mask": P(first)} | whole
with sharding.mesh(mesh) as over:
    places = {name: jax.sharding.NamedSharding(over, spec) for name, spec in specs.items()}

    def placed(name):
        return jax.make_array_from_callback(values[name].shape, places[name], lambda index: values[name][index])

    if saved != "-":
        with checkpoint.Saver(saved) as saver:
            saver.save(3, {name: placed(name) for name in values}, {"saved": "by " + sys.argv[1]})
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places[name]) for name, x in values.items()}
    for folder in others:
        found = checkpoint.restore(folder, like)
        for name, array in found.items():
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), values[name][shard.index])
        print("same", folder)
"""

FORMS = [
    (1, '{"data": 4}'),
    (1, '{"data": 2, "tensor": 2}'),
    (2, '{"data": 4}'),
    (2, '{"tensor": 2, "data": 2}'),
    (4, '{"fsdp": 4}'),
    (4, '{"data": 2, "fsdp": 2}'),
]


@pytest.mark.slow
def test_every_form_restores_what_every_form_saved(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def ran(form: int, *arguments: str) -> str:
        processes, mesh = FORMS[form]
        options = ["--processes", str(processes), "--devices-per-process", str(4 // processes), "--all-lines"]
        command = ["launch", *options, "--", str(script), mesh, *arguments]
        with Launched(args=command, folder=tmp_path / f"{form}-{len(arguments)}") as run:
            assert run.end() == 0, run.text
        return run.text

    folders = [str(tmp_path / f"saved-{form}") for form in range(len(FORMS))]
    for form, folder in enumerate(folders):
        ran(form, folder)
    for form, (processes, _) in enumerate(FORMS):
        said = ran(form, "-", *folders)
        assert all(said.count(f"same {folder}\n") == processes for folder in folders), said
