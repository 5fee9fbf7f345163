"""Reading a state back, onto whatever mesh it is asked for, with every array held against its checksum."""

import os
from collections.abc import Mapping
from typing import Any

import jax

from ..errors import ShardingError
from .checksums import checksums
from .folder import ARRAYS, FACTS, Directory, Json, damaged, document, existing_step, first_line, reader
from .names import Tree, is_key, named_leaves, stored_shape

AllFacts = Mapping[str, Mapping[str, Json]]
"""What was written about each array, by name."""


def restore(directory: Directory, like: Tree, step: int | None = None) -> Tree:
    """The state of the checkpoint of `step`, by default the newest, as `like` describes it.

    `like` has the structure to come back; its leaves are arrays, or ShapeDtypeStructs with a sharding, which may be on
    another mesh than the one that saved. Every array is checked against its checksum.
    """
    step = existing_step(directory, step)
    wanted = named_leaves(like)
    facts = document(directory, step, FACTS)
    _check_same_arrays(directory, step, facts, wanted)
    arrays = _read_whole(directory, step, facts, wanted)
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])


def restore_named(directory: Directory, step: int | None = None, *, prefix: str = "") -> dict[str, jax.Array]:
    """The arrays of a checkpoint whose names begin with `prefix`, whole, on the first device; no model is needed."""
    step = existing_step(directory, step)
    facts = document(directory, step, FACTS)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(tuple(fact["shape"]), _dtype(fact), sharding=place)
        for name, fact in facts.items()
        if name.startswith(prefix)
    }
    if wanted:
        return _read_whole(directory, step, facts, wanted)
    firsts = sorted({name.split("/")[0] for name in facts})
    raise ShardingError(
        f"read the arrays {prefix}* of step {step} in {os.fspath(directory)!r}",
        there=f"{len(facts)} arrays: {', '.join(f'{first}/...' for first in firsts)}",
        must="at least one array must have such a name",
    )


def _dtype(fact: Mapping[str, Json]) -> Any:
    return jax.random.key(0, impl=fact["impl"]).dtype if fact.get("impl") else fact["dtype"]


def _read_whole(directory: Directory, step: int, facts: AllFacts, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The wanted arrays of `step`, or an error that names the newest older step where they are good."""
    try:
        return _read(directory, step, facts, wanted)
    except _Damage as damage:
        reason = str(damage)
    raise damaged(directory, step, reason, lambda older: _is_good(directory, older, wanted))


def _is_good(directory: Directory, step: int, wanted: Mapping[str, Any]) -> bool:
    try:
        facts = document(directory, step, FACTS)
        _check_same_arrays(directory, step, {name: facts[name] for name in wanted if name in facts}, wanted)
        _read(directory, step, facts, wanted)
    except (_Damage, ShardingError):
        return False
    return True


class _Damage(Exception):
    """What is wrong with a checkpoint."""


def _read(directory: Directory, step: int, facts: AllFacts, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    import orbax.checkpoint as ocp

    targets = {name: stored_shape(leaf) for name, leaf in wanted.items()}
    request = ocp.args.PyTreeRestore(
        targets, restore_args=ocp.checkpoint_utils.construct_restore_args(targets), partial_restore=True
    )
    with reader(directory) as manager:
        try:
            arrays = manager.restore(step, args=ocp.args.Composite(arrays=request))[ARRAYS]
        except Exception as error:
            raise _Damage(f"{type(error).__name__}: {first_line(error)}") from None
    wrong = [name for name, value in checksums(arrays).items() if value != facts[name]["checksum"]]
    if wrong:
        raise _Damage(f"checksums differ: {', '.join(wrong)}")
    return {name: _as_asked(arrays[name], leaf, facts[name]) for name, leaf in wanted.items()}


def _as_asked(array: jax.Array, leaf: Any, fact: Mapping[str, Json]) -> jax.Array:
    if not is_key(leaf):
        return array
    return jax.device_put(jax.random.wrap_key_data(array, impl=fact["impl"]), leaf.sharding)


def _check_same_arrays(directory: Directory, step: int, facts: AllFacts, wanted: Mapping[str, Any]) -> None:
    """Raise an error that lists every array that is missing, left over, or of another shape or dtype."""
    differences = [f"{name}: not in the checkpoint" for name in wanted if name not in facts]
    differences += [f"{name}: in the checkpoint alone" for name in facts if name not in wanted]
    for name in wanted:
        if name not in facts:
            continue
        saved = (tuple(facts[name]["shape"]), facts[name]["dtype"])
        asked = (tuple(wanted[name].shape), str(wanted[name].dtype))
        if saved != asked:
            differences.append(f"{name}: saved as {saved[1]}{list(saved[0])}, asked as {asked[1]}{list(asked[0])}")
    if differences:
        raise ShardingError(
            f"restore step {step} from {os.fspath(directory)!r}",
            there=differences,
            must="the arrays asked for must have the names, shapes and dtypes that were saved",
            fix="describe the model and optimizer that were saved",
        )
