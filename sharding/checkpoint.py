"""Checkpoints: a pytree of arrays saved by name with Orbax, and read back onto any mesh.

Arrays are stored under the names of their paths (`params/blocks/0/w`), so what was saved does not depend on the mesh
nor on the Python types around the arrays. Beside them lies a JSON document of whatever the caller wants to keep, and
for every array its shape, dtype, spec and a checksum: Orbax itself would cast another dtype in silence, and a bit that
flipped on disk would come back as a number.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from . import paths
from .errors import ShardingError

Tree = Any
"""A pytree of arrays, or of ShapeDtypeStructs that stand for arrays."""

Json = Any
"""What the json module can write."""

_ARRAYS, _FACTS, _EXTRA = "arrays", "facts", "extra"


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A checkpoint on its way to disk; it counts once `wait` came back."""

    step: int
    manager: Any

    def wait(self) -> None:
        """Wait until the checkpoint is whole on disk. Raises what went wrong while it was written."""
        self.manager.wait_until_finished()
        self.manager.close()


def save(directory: str | os.PathLike[str], step: int, state: Tree, extra: Json = None, *, keep: int = 3) -> Saving:
    """Begin to save `state` and `extra` as the checkpoint of `step`.

    Comes back once the arrays are copied from the devices; the rest goes on in the background, and the state may be
    donated at once. Of older checkpoints the newest `keep`, with this one, stay. A step that is there already is left
    as it is.
    """
    import orbax.checkpoint as ocp

    arrays = named_leaves(state)
    sums = _checksums(arrays)
    facts = {name: _facts(array, sums[name]) for name, array in arrays.items()}
    manager = _manager(directory, max_to_keep=keep)
    if step not in manager.all_steps():
        items = ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays),
            facts=ocp.args.JsonSave(facts),
            extra=ocp.args.JsonSave({"extra": extra}),
        )
        manager.save(step, args=items, force=True)
    return Saving(step=step, manager=manager)


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """The newest step with a whole checkpoint in `directory`, or None."""
    if not Path(directory).is_dir():
        return None
    with _manager(directory) as manager:
        return manager.latest_step()


def extra(directory: str | os.PathLike[str], step: int | None = None) -> Json:
    """What was given as `extra` when the checkpoint of `step`, by default the newest, was saved."""
    return _read_json(directory, _existing_step(directory, step), _EXTRA)["extra"]


def restore(directory: str | os.PathLike[str], like: Tree, step: int | None = None) -> Tree:
    """The state of the checkpoint of `step`, by default the newest, as `like` describes it.

    `like` has the structure to come back; its leaves are arrays, or ShapeDtypeStructs with a sharding, which may be on
    another mesh than the one that saved. Every array is checked against its checksum.
    """
    import orbax.checkpoint as ocp

    step = _existing_step(directory, step)
    wanted = named_leaves(like)
    facts = _read_json(directory, step, _FACTS)
    _check_same_arrays(directory, step, facts, wanted)
    targets = {name: _target(leaf) for name, leaf in wanted.items()}
    with _manager(directory) as manager:
        try:
            items = manager.restore(step, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(targets)))
        except Exception as error:
            raise _damaged(directory, step, f"{type(error).__name__}: {_first_line(error)}") from None
    arrays = items[_ARRAYS]
    _check_sums(directory, step, facts, arrays)
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])


def named_leaves(tree: Tree) -> dict[str, Any]:
    """The leaves of `tree` by the name of their path: its keys joined by slashes, nnx's closing `value` dropped."""
    return {paths.text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _manager(directory: str | os.PathLike[str], **options: Any) -> Any:
    import orbax.checkpoint as ocp

    # Orbax refuses relative paths.
    return ocp.CheckpointManager(Path(directory).absolute(), options=ocp.CheckpointManagerOptions(**options))


def _target(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _facts(array: jax.Array, checksum: int) -> dict[str, Json]:
    spec = getattr(array.sharding, "spec", None)
    return {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "spec": None if spec is None else str(spec),
        "checksum": checksum,
    }


def _checksums(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    # One after the other: XLA:CPU of JAX 0.10.2 may hang when several programs that communicate are in flight at once
    # on fewer cores than devices. Delete the waiting when that release is no longer supported.
    jax.block_until_ready(arrays)
    return {name: int(jax.block_until_ready(_checksum(array))) for name, array in arrays.items()}


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    """The sum modulo 2^32 of every element's bits times an odd number that its position gives.

    A sum does not depend on the order, hence not on the mesh. An odd factor turns every change of one element into a
    change of the sum.
    """
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
    position = jnp.zeros(bits.shape, jnp.uint32)
    for dim, length in enumerate(bits.shape):
        position = position * jnp.uint32(length) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
    factor = position * jnp.uint32(2654435761) ^ (position >> 15)
    return jnp.sum(bits * (factor | 1), dtype=jnp.uint32)


def _existing_step(directory: str | os.PathLike[str], step: int | None) -> int:
    with_checkpoint = _steps(directory)
    wanted = step if step is not None else max(with_checkpoint, default=None)
    if wanted in with_checkpoint and wanted is not None:
        return wanted
    asked = "newest checkpoint" if step is None else f"checkpoint of step {step}"
    there = "steps " + ", ".join(map(str, with_checkpoint)) if with_checkpoint else "no checkpoint"
    raise ShardingError(
        f"read the {asked} in {os.fspath(directory)!r}",
        there=there,
        must="the checkpoint must be there",
        fix=f"step {with_checkpoint[-1]}" if with_checkpoint else "save one first",
    )


def _steps(directory: str | os.PathLike[str]) -> list[int]:
    if not Path(directory).is_dir():
        return []
    with _manager(directory) as manager:
        return sorted(manager.all_steps())


def _read_json(directory: str | os.PathLike[str], step: int, item: str) -> Json:
    import orbax.checkpoint as ocp

    with _manager(directory) as manager:
        try:
            return manager.restore(step, args=ocp.args.Composite(**{item: ocp.args.JsonRestore()}))[item]
        except Exception as error:
            raise _damaged(directory, step, f"{item}: {_first_line(error)}") from None


def _check_same_arrays(
    directory: str | os.PathLike[str], step: int, facts: Mapping[str, Mapping[str, Json]], wanted: Mapping[str, Any]
) -> None:
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


def _check_sums(
    directory: str | os.PathLike[str], step: int, facts: Mapping[str, Mapping[str, Json]], arrays: Mapping[str, Any]
) -> None:
    damaged = [name for name, value in _checksums(arrays).items() if value != facts[name]["checksum"]]
    if damaged:
        raise _damaged(directory, step, f"checksums differ: {', '.join(damaged)}")


def _damaged(directory: str | os.PathLike[str], step: int, reason: str) -> ShardingError:
    older = [known for known in _steps(directory) if known < step]
    fix = f"the checkpoint of step {older[-1]}" if older else "there is no older checkpoint to go back to"
    return ShardingError(
        f"restore step {step} from {os.fspath(directory)!r}", there=reason, must="a checkpoint must be whole", fix=fix
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
