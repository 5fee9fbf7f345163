"""Checkpoints: a pytree of arrays saved by name with Orbax, and read back onto any mesh.

Arrays are stored under the names of their paths (`params/blocks/0/w`), so what was saved does not depend on the mesh
nor on the Python types around the arrays. Beside them lies a JSON document of whatever the caller wants to keep, and
for every array its shape, dtype, spec and a checksum: Orbax itself would cast another dtype in silence, and a bit that
flipped on disk would come back as a number. A checkpoint is listed once it is whole, and is no longer listed before the
first of its files is removed. Unless a step is asked for, the newest that is still whole is restored.
"""

from .description import ArrayFacts, Description, describe
from .folder import best_step, extra, figures, latest_step, steps
from .names import named_leaves
from .restore import Restored, restore, restore_named, restore_newest, verify
from .save import Saver, Saving, save
from .tensors import export_tensors, read_tensors, write_tensors

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
