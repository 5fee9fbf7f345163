"""Checkpoints: a pytree of arrays saved by name with Orbax, and restored onto any mesh.

In: pytrees of arrays, and a directory. Out: checkpoints in it, pytrees restored from them, safetensors files.

Arrays are stored under their paths (`params/blocks/0/w`), so a checkpoint does not depend on the mesh, nor on the
Python types around the arrays. Beside them are a JSON document of the caller's, and the shape, dtype, spec and checksum
of every array: Orbax itself would silently cast another dtype, and a bit that flipped on disk would be read as a
number. A checkpoint is listed once it is complete, and unlisted before the first of its files is removed. By default
the newest checkpoint that is not corrupted is restored.

Example:
    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> from sharding import checkpoint
    >>> folder = tempfile.mkdtemp()
    >>> state = {"params": {"w": jnp.ones((4, 2))}, "step": jnp.array(0)}
    >>> with checkpoint.Saver(folder, keep=2) as saver:
    ...     saver.save(10, state, extra={"seed": 0}, figure=2.5)
    ...     saver.save(20, state, extra={"seed": 0}, figure=2.7)
    >>> checkpoint.save(folder, 30, state).wait()
    >>> checkpoint.steps(folder), checkpoint.latest_step(folder), checkpoint.best_step(folder)
    ([10, 20, 30], 30, 10)
    >>> checkpoint.figures(folder), checkpoint.extra(folder, 20), checkpoint.verify(folder)
    ({10: 2.5, 20: 2.7}, {'seed': 0}, {30: '', 20: '', 10: ''})
    >>> [facts.name for facts in checkpoint.describe(folder).arrays]
    ['params/w', 'step']
    >>> list(checkpoint.named_leaves(checkpoint.restore(folder, state)))
    ['params/w', 'step']
    >>> list(checkpoint.restore_named(folder, prefix="params/"))
    ['params/w']
    >>> checkpoint.export_tensors(folder, f"{folder}/params.safetensors")
    ['w']
    >>> checkpoint.write_tensors(state["params"], f"{folder}/w.safetensors")
    ['w']
    >>> checkpoint.read_tensors(f"{folder}/w.safetensors")["w"].shape
    (4, 2)
"""

from .array_names import named_leaves
from .corruption import verify
from .directory import latest_step, steps
from .restore import Restored, restore, restore_named, restore_newest
from .safetensors_file import export_tensors, read_tensors, write_tensors
from .save import Saver, Saving, save
from .summary import ArrayFacts, Description, best_step, describe, extra, figures

__all__ = [
    "ArrayFacts",
    "Description",
    "Restored",
    "Saver",
    "Saving",
    "best_step",
    "describe",
    "export_tensors",
    "extra",
    "figures",
    "latest_step",
    "named_leaves",
    "read_tensors",
    "restore",
    "restore_named",
    "restore_newest",
    "save",
    "steps",
    "verify",
    "write_tensors",
]
