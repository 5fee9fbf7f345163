"""Restoring a state onto any mesh, with the checksum of every array verified."""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ..errors import ShardingError
from .array_names import Tree, named_leaves
from .corruption import CorruptedError, corruption_error, document, document_or_none, unreadable, verified_arrays
from .directory import FACTS, Directory, existing_step, steps
from .multiprocess_read import AllFacts, on_one_device


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The state of the newest checkpoint that is not corrupted."""

    step: int
    state: Tree
    damaged: Mapping[int, str]
    """Corrupted newer steps, with the corruption found."""


def restore(directory: Directory, like: Tree, step: int | None = None) -> Tree:
    """Restores the checkpoint of `step`, by default the newest that is not corrupted.

    The result has the structure, shapes, dtypes and shardings of `like`, whose leaves are arrays, or ShapeDtypeStructs
    with a sharding, on any mesh. The checksum of every array is verified.

    Raises:
        ShardingError: no such checkpoint; other arrays than in `like`; or a corrupted checkpoint, with the newest older
            one that is good.

    Warns:
        UserWarning: newer checkpoints are corrupted.
    """
    if step is None:
        found = restore_newest(directory, like)
        for corrupted_step, reason in found.damaged.items():
            where = f"the checkpoint of step {corrupted_step} in {os.fspath(directory)!r}"
            warnings.warn(f"{where} is corrupted ({reason}): restored step {found.step}", stacklevel=2)
        return found.state
    step = existing_step(directory, step)
    targets, facts = named_leaves(like), document(directory, step, FACTS)
    _check_same_arrays(directory, step, facts, targets)
    return _as_like(like, _read_or_suggest(directory, step, facts, targets))


def restore_newest(directory: Directory, like: Tree) -> Restored:
    """Restores the newest checkpoint that is not corrupted, and reports the newer ones.

    Raises:
        ShardingError: no checkpoint, only corrupted ones, or other arrays than in `like`.
    """
    existing_step(directory, None)
    targets, corrupted = named_leaves(like), dict[int, str]()
    for step in reversed(steps(directory)):
        try:
            facts = document_or_none(directory, step, FACTS)
            if facts is None:
                raise CorruptedError(unreadable(FACTS))
            _check_same_arrays(directory, step, facts, targets)
            arrays = verified_arrays(directory, step, facts, targets)
        except CorruptedError as error:
            corrupted[step] = str(error)
        else:
            return Restored(step=step, state=_as_like(like, arrays), damaged=corrupted)
    raise ShardingError(
        f"restore from {os.fspath(directory)!r}",
        found=[f"step {step}: {reason}" for step, reason in corrupted.items()],
        required="a checkpoint that is not corrupted",
    )


def restore_named(directory: Directory, step: int | None = None, *, prefix: str = "") -> dict[str, jax.Array]:
    """Restores the arrays whose names start with `prefix`, each on this process's first device; no model is needed."""
    step = existing_step(directory, step)
    facts = document(directory, step, FACTS)
    targets = {name: shape for name, shape in on_one_device(facts).items() if name.startswith(prefix)}
    if targets:
        return _read_or_suggest(directory, step, facts, targets)
    firsts = sorted({name.split("/")[0] for name in facts})
    raise ShardingError(
        f"read the arrays {prefix}* of step {step} in {os.fspath(directory)!r}",
        found=f"{len(facts)} arrays: {', '.join(f'{first}/...' for first in firsts)}",
        required="at least one array with that prefix",
    )


def _as_like(like: Tree, arrays: Mapping[str, jax.Array]) -> Tree:
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in named_leaves(like)])


def _read_or_suggest(
    directory: Directory, step: int, facts: AllFacts, targets: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """The arrays of `step`, or an error that suggests the newest older step where they are good."""
    try:
        return verified_arrays(directory, step, facts, targets)
    except CorruptedError as error:
        reason = str(error)
    raise corruption_error(directory, step, reason, lambda older: _is_good(directory, older, targets))


def _is_good(directory: Directory, step: int, targets: Mapping[str, Any]) -> bool:
    try:
        facts = document(directory, step, FACTS)
        _check_same_arrays(directory, step, {name: facts[name] for name in targets if name in facts}, targets)
        verified_arrays(directory, step, facts, targets)
    except (CorruptedError, ShardingError):
        return False
    return True


def _check_same_arrays(directory: Directory, step: int, facts: AllFacts, targets: Mapping[str, Any]) -> None:
    """Raises one error for all arrays that are missing, unexpected, or of another shape or dtype."""
    differences = [f"{name}: not in the checkpoint" for name in targets if name not in facts]
    differences += [f"{name}: only in the checkpoint" for name in facts if name not in targets]
    for name in targets:
        if name not in facts:
            continue
        saved = (tuple(facts[name]["shape"]), facts[name]["dtype"])
        target = (tuple(targets[name].shape), str(targets[name].dtype))
        if saved != target:
            differences.append(f"{name}: saved as {saved[1]}{list(saved[0])}, requested {target[1]}{list(target[0])}")
    if differences:
        raise ShardingError(
            f"restore step {step} from {os.fspath(directory)!r}",
            found=differences,
            required="the names, shapes and dtypes of the saved arrays",
            fix="the model and optimizer that were saved",
        )
