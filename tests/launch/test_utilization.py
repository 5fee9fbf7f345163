import jax

import sharding
from sharding import P
from sharding.launch import utilization, workloads
from sharding.launch.config.model_config import ModelOptions
from sharding.launch.config.optimizer_config import Optimization
from sharding.launch.progress import Console

W = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")


def completion():
    return sharding.jit(lambda x, w: x @ w, in_shardings=(P("data"), None)).complete(W, W)


def test_the_estimate_in_a_line():
    with sharding.mesh(data=8, devices="v5p:2x2x2"):
        found = completion().estimate()
    line = utilization.summary(found)
    assert line.startswith("estimated ")
    assert f"on v5p:2x2x2, MFU {found.mfu:.1%}, bound by compute" in line


def test_none_on_cpus():
    with sharding.mesh(data=8) as mesh:
        assert utilization.estimate(completion(), mesh) is None


def test_mfu_in_the_progress_line():
    family, model = workloads.find(ModelOptions(name="gpt-tiny"))
    workload = family.build("gpt-tiny", model, Optimization(), steps=2, seed=0)
    console = Console(workload=workload, num_steps=2, quiet=True)
    values = {"loss": 2.0, console.workload.throughput_name: 10.0, "memory_bytes": 1e6}
    assert "MFU" not in console._format(values)
    assert console._format(values | {"mfu": 0.4321}).endswith("1 MB  MFU 43.2%")
