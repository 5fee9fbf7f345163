"""Reading arrays of a checkpoint in all processes, each its part, onto the shardings of the target arrays."""

import math
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

    def read(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        request = ocp.args.PyTreeRestore(
            shapes, restore_args=ocp.checkpoint_utils.construct_restore_args(shapes), partial_restore=True
        )
        found = manager.restore(step, args=ocp.args.Composite(arrays=request))[ARRAYS]
        return jax.block_until_ready(found)

    arrays: dict[str, jax.Array] = {}
    reason = ""
    # In its own thread, which runs no event loop: in Jupyter's, reads that Orbax gave up on would report errors later.
    with reader(directory) as manager, ThreadPoolExecutor(1) as thread:
        try:
            for group in _groups({name: stored_shape(leaf) for name, leaf in targets.items()}):
                arrays |= thread.submit(read, group).result()
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
    # The caller runs one program over all processes: none may start it unless every process has read its part.
    reason = next((text for text in processes.all_gather_text("restore", reason) if text), "")
    if reason:
        raise UnreadableError(reason)
    return {name: arrays[name] for name in targets}  # in the same order in every process


def _groups(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """What is read at once: arrays with replicas in this process in groups no larger than the largest, all others.

    Orbax reads all that it is asked for at once. It holds the bytes of an array until every replica has a copy.
    """
    sizes = {name: math.prod(shape.shape) * shape.dtype.itemsize for name, shape in shapes.items()}
    limit, groups, taken = max(sizes.values(), default=0), [dict[str, jax.ShapeDtypeStruct]()], 0
    for name in shapes:
        if not _has_local_replicas(shapes[name]):
            groups[0][name] = shapes[name]
            continue
        if len(groups) == 1 or taken + sizes[name] > limit:
            groups.append({})
            taken = 0
        groups[-1][name] = shapes[name]
        taken += sizes[name]
    return [group for group in groups if group]


def _has_local_replicas(shape: jax.ShapeDtypeStruct) -> bool:
    """Whether several devices of this process have the same elements of an array."""
    if shape.sharding is None:
        return False
    parts = [repr(index) for index in shape.sharding.addressable_devices_indices_map(shape.shape).values()]
    return len({*parts}) < len(parts)


def on_one_device(facts: AllFacts) -> dict[str, jax.ShapeDtypeStruct]:
    """The abstract arrays of a checkpoint, each on the first device of this process."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return {
        name: jax.ShapeDtypeStruct(tuple(fact["shape"]), _dtype(fact), sharding=device) for name, fact in facts.items()
    }


def _dtype(fact: Mapping[str, Json]) -> Any:
    return jax.random.key(0, impl=fact["impl"]).dtype if fact.get("impl") else fact["dtype"]
