"""Reading arrays of a checkpoint in all processes, each its part, onto the shardings of the target arrays."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from ..distributed import processes
from .array_names import stored_shape
from .directory import ARRAYS, Directory, Json, first_line, reader

AllFacts = Mapping[str, Mapping[str, Json]]
"""The facts stored for each array, by name."""


class UnreadableError(Exception):
    """Some process failed to read its part of the arrays."""


def read_arrays(directory: Directory, step: int, targets: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Reads the arrays named in `targets` as stored, with the shardings given there; key arrays as their bits.

    Raises:
        UnreadableError: in all processes, if one of them failed.
    """
    import orbax.checkpoint as ocp

    shapes = {name: stored_shape(leaf) for name, leaf in targets.items()}
    request = ocp.args.PyTreeRestore(
        shapes, restore_args=ocp.checkpoint_utils.construct_restore_args(shapes), partial_restore=True
    )
    arrays, reason = {}, ""
    # In its own thread, which runs no event loop: in Jupyter's, reads that Orbax gave up on would report errors later.
    with reader(directory) as manager, ThreadPoolExecutor(1) as thread:
        try:
            reading = thread.submit(manager.restore, step, args=ocp.args.Composite(arrays=request))
            arrays = reading.result()[ARRAYS]
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
    # The caller runs one program over all processes: none may start it unless every process has read its part.
    reason = next((text for text in processes.all_gather_text("restore", reason) if text), "")
    if reason:
        raise UnreadableError(reason)
    return arrays


def on_one_device(facts: AllFacts) -> dict[str, jax.ShapeDtypeStruct]:
    """The abstract arrays of a checkpoint, each on the first device of this process."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return {
        name: jax.ShapeDtypeStruct(tuple(fact["shape"]), _dtype(fact), sharding=device) for name, fact in facts.items()
    }


def _dtype(fact: Mapping[str, Json]) -> Any:
    return jax.random.key(0, impl=fact["impl"]).dtype if fact.get("impl") else fact["dtype"]
