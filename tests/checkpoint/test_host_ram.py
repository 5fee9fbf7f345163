"""Host memory: saving takes at most a copy of the largest array, 50 saves no more, restoring the state and three."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, json, sys
from pathlib import Path
import jax
import numpy as np
jax.config.update("jax_num_cpu_devices", 8)
from jax.sharding import NamedSharding
from sharding import P, checkpoint

folder, axis, arrays, array_bytes, saves = *sys.argv[1:3], *map(int, sys.argv[3:])

def kilobytes(name):
    return int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0])

def peak_beyond_now(f):
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far
    before = kilobytes("VmRSS")
    result = f()
    return 1024 * (kilobytes("VmHWM") - before), result

mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
sharding = NamedSharding(mesh, {"both": P(("data", "tensor")), "tensor": P("tensor"), "none": P()}[axis])
state = {str(k): jax.device_put(np.full((8, array_bytes // 32), k, np.float32), sharding) for k in range(arrays)}
resident, extra = [], []
with checkpoint.Saver(folder, keep=2) as saver:
    for step in range(saves):
        extra.append(peak_beyond_now(lambda: (saver.save(step, state), saver.wait()))[0])
        ctypes.CDLL(None).malloc_trim(0)  # what threads freed is not kept by the saver
        resident.append(1024 * kilobytes("VmRSS"))
checkpoint.restore(folder, state, saves - 1)  # once for what is loaded and compiled
restoring, _ = peak_beyond_now(lambda: jax.block_until_ready(checkpoint.restore(folder, state, saves - 1)))
print(json.dumps({"resident": resident, "extra": extra, "restoring": restoring}))
"""
SLACK = 8 * 2**20
"""What allocator and threads take, whatever the arrays."""
RETURNED = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(2**17)}
"""Settings of glibc's malloc by which freed arrays go back to the system at once: what is measured is what is held."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("axis", "copies", "array_bytes"),
    [
        ("both", 1, 2**21),
        pytest.param("none", 8, 2**24, marks=pytest.mark.slow),
        pytest.param("tensor", 2, 2**24, marks=pytest.mark.slow),
        pytest.param("both", 1, 2**27, marks=pytest.mark.slow),
    ],
    ids=["16 MB", "replicated", "partially replicated", "1 GB of state"],
)
def test_memory_of_saves_and_restores_is_bounded(tmp_path, axis, copies, array_bytes):
    arrays, saves = 8, 50 if copies == 1 else 12
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), axis, *map(str, (arrays, array_bytes, saves))]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | RETURNED)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert max(found["extra"][5:]) <= array_bytes + SLACK
    assert found["resident"][-1] - found["resident"][9] <= SLACK
    assert found["restoring"] <= (copies * arrays + 3) * array_bytes + SLACK
