"""`sharding calibrate`: measure this machine's devices for the cost model."""

import sharding
from sharding import cost

from .. import device_setup
from ..config.calibrate_config import Calibrate
from ..config.mesh_config import parse_mesh


def run(config: Calibrate) -> None:
    """Measure the devices, print the results and write them to `config.out`."""
    axes = device_setup.set_up_devices(parse_mesh(config.mesh), num_devices=config.devices)
    mesh = sharding.mesh(axes).mesh
    print(f"mesh    {device_setup.format_axes(axes)}: rates per device with all devices busy", flush=True)
    effort = cost.QUICK if config.quick else cost.Effort()
    cost.calibrate(mesh, like=config.like, effort=effort, say=lambda line: print(line, flush=True)).save(config.out)
    print(f"table   {config.out}")
