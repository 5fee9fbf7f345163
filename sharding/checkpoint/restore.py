"""Reading a state back, onto whatever mesh it is asked for, with every array held against its checksum."""

import os
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from .. import processes
from ..errors import ShardingError
from .checksums import checksums
from .folder import (
    ARRAYS,
    EXTRA,
    FACTS,
    Directory,
    Json,
    damaged,
    document,
    document_or_none,
    existing_step,
    first_line,
    reader,
    steps,
)
from .names import Tree, is_key, named_leaves, stored_shape

AllFacts = Mapping[str, Mapping[str, Json]]
"""What was written about each array, by name."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The newest checkpoint that is whole."""

    step: int
    state: Tree
    damaged: Mapping[int, str]
    """What is wrong with the newer ones, by step."""


def restore(directory: Directory, like: Tree, step: int | None = None) -> Tree:
    """The state of the checkpoint of `step`, by default the newest that is whole, as `like` describes it.

    `like` has the structure to come back; its leaves are arrays, or ShapeDtypeStructs with a sharding, which may be on
    another mesh than the one that saved. Every array is checked against its checksum.

    Raises:
        ShardingError: no such checkpoint, other arrays than those asked for, or damage; where an older one is whole it
            is named.

    Warns:
        UserWarning: newer checkpoints are damaged.
    """
    if step is None:
        found = restore_newest(directory, like)
        for damaged_step, reason in found.damaged.items():
            where = f"the checkpoint of step {damaged_step} in {os.fspath(directory)!r}"
            warnings.warn(f"{where} is damaged ({reason}): restored is that of step {found.step}", stacklevel=2)
        return found.state
    step = existing_step(directory, step)
    wanted, facts = named_leaves(like), document(directory, step, FACTS)
    _check_same_arrays(directory, step, facts, wanted)
    return _as_like(like, _read_whole(directory, step, facts, wanted))


def restore_newest(directory: Directory, like: Tree) -> Restored:
    """The newest checkpoint that is whole, as `like` describes it, and what is wrong with newer ones.

    Raises:
        ShardingError: no checkpoint, none that is whole, or other arrays than those asked for.
    """
    existing_step(directory, None)
    wanted, damage = named_leaves(like), dict[int, str]()
    for step in reversed(steps(directory)):
        try:
            facts = document_or_none(directory, step, FACTS)
            if facts is None:
                raise _Damage(_unreadable(FACTS))
            _check_same_arrays(directory, step, facts, wanted)
            arrays = _read(directory, step, facts, wanted)
        except _Damage as error:
            damage[step] = str(error)
        else:
            return Restored(step=step, state=_as_like(like, arrays), damaged=damage)
    raise ShardingError(
        f"restore from {os.fspath(directory)!r}",
        there=[f"step {step}: {reason}" for step, reason in damage.items()],
        must="one checkpoint must be whole",
    )


def verify(directory: Directory, step: int | None = None) -> dict[int, str]:
    """What is wrong with each checkpoint, by default of all steps, the newest first; empty where it is whole.

    Every document and every array is read and held against its checksum, one checkpoint after the other, on the first
    device: no mesh is needed.
    """
    asked = [existing_step(directory, step)] if step is not None else reversed(steps(directory))
    return {each: _damage_of(directory, each) for each in asked}


def _damage_of(directory: Directory, step: int) -> str:
    documents = {part: document_or_none(directory, step, part) for part in (FACTS, EXTRA)}
    unread = next((part for part, found in documents.items() if found is None), None)
    if unread:
        return _unreadable(unread)
    facts = documents[FACTS]
    try:
        _read(directory, step, facts, _on_one_device(facts))
    except _Damage as error:
        return str(error)
    return ""


def _unreadable(part: str) -> str:
    return f"{part}: can't be read, or its checksum differs"


def _as_like(like: Tree, arrays: Mapping[str, jax.Array]) -> Tree:
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in named_leaves(like)])


def restore_named(directory: Directory, step: int | None = None, *, prefix: str = "") -> dict[str, jax.Array]:
    """The arrays of a checkpoint whose names begin with `prefix`, whole, on the first device; no model is needed."""
    step = existing_step(directory, step)
    facts = document(directory, step, FACTS)
    wanted = {name: shape for name, shape in _on_one_device(facts).items() if name.startswith(prefix)}
    if wanted:
        return _read_whole(directory, step, facts, wanted)
    firsts = sorted({name.split("/")[0] for name in facts})
    raise ShardingError(
        f"read the arrays {prefix}* of step {step} in {os.fspath(directory)!r}",
        there=f"{len(facts)} arrays: {', '.join(f'{first}/...' for first in firsts)}",
        must="at least one array must have such a name",
    )


def _on_one_device(facts: AllFacts) -> dict[str, jax.ShapeDtypeStruct]:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        name: jax.ShapeDtypeStruct(tuple(fact["shape"]), _dtype(fact), sharding=place) for name, fact in facts.items()
    }


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
    arrays, reason = {}, ""
    # In a thread of its own, where no event loop runs: in that of Jupyter reads that Orbax gave up would be heard of.
    with reader(directory) as manager, ThreadPoolExecutor(1) as thread:
        try:
            reading = thread.submit(manager.restore, step, args=ocp.args.Composite(arrays=request))
            arrays = reading.result()[ARRAYS]
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
    # What follows is one program of all processes: none begins it unless every one has read its part.
    reason = next((said for said in processes.said("restore", reason) if said), "")
    if reason:
        raise _Damage(reason)
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
