"""Plans the step of `plain_gpt.py` by XLA's own auto-sharding, which libtpu contains up to 0.0.37; needs no TPU.

    python tests/benchmarks/peers/xla_auto_sharding.py '{"layers": 1}' --devices v5e:4x4 --mesh data=4,model=4

Needs JAX of before May 2026, which can ask for it (`AUTO`). Prints one line of JSON: the specs of the arguments, and
the seconds of a compile that plans and of one that is told the plan; the difference is what planning takes.
"""

import argparse
import json
import os
import time

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import numpy as np
import plain_gpt
from jax._src.sharding_impls import AUTO
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

OPTION = "xla_tpu_auto_spmd_partitioning_memory_budget_gb"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", type=json.loads)
    parser.add_argument("--devices", default="v5e:4x4")
    parser.add_argument("--mesh", default="data=4,model=4")
    parser.add_argument("--budget-gb", type=int, default=0)
    options = parser.parse_args()
    jax.config.update("jax_use_shardy_partitioner", False)  # with Shardy, everything stays replicated
    axes = {name: int(size) for name, size in (part.split("=") for part in options.mesh.split(","))}
    topology = topologies.get_topology_desc(platform="tpu", topology_name=options.devices)
    devices = np.array(topology.devices).reshape(tuple(axes.values()))
    mesh = Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    sizes = plain_gpt.Sizes(**options.sizes)
    step, args = plain_gpt.train_step(sizes), plain_gpt.arguments(sizes)

    planned, planning = compiled(step, args, AUTO(mesh), AUTO(mesh), {OPTION: options.budget_gb})
    told, telling = compiled(step, args, planned.input_shardings[0], planned.output_shardings, {})
    specs = [entries(one) for one in jax.tree.leaves(planned.input_shardings[0])]
    print(
        json.dumps(
            {
                "jax": jax.__version__,
                "specs": specs,
                "planning": planning,
                "telling": telling,
                "peak_bytes": planned.memory_analysis().peak_memory_in_bytes,
                "text": planned.as_text(),
            }
        )
    )


def compiled(step, args, in_shardings, out_shardings, options):
    """A compiled step with the seconds that it took, of the clock and of all cores."""
    begun, cpu = time.perf_counter(), time.process_time()
    jitted = jax.jit(step, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=0)
    found = jitted.lower(*args).compile(compiler_options=options)
    return found, {"seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - cpu}


def entries(sharding):
    """A spec as lists: per dim None, an axis or several."""
    return [list(entry) if isinstance(entry, tuple) else entry for entry in sharding.spec]


if __name__ == "__main__":
    main()
