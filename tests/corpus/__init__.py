"""Programs that other people wrote, as their users would shard them: what predictions are held against.

In: packages from the registry, which the extra `corpus` installs (MaxText apart: `pip install --no-deps maxtext`). Out:
`programs()`, name -> a function from mesh axis sizes to a `Step` of shapes. Each adapter builds the package's own
model, loss and optimizer at a real size and shards the parameters and the batch; nothing else is changed. No array is
made.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping

from support.train_steps.step import Sizes, Step

MESHES: tuple[Sizes, ...] = ({"data": 2, "model": 4}, {"data": 2, "fsdp": 2, "model": 2}, {"data": 8, "model": 8})
"""Every program is built for each of these meshes."""

ADAPTERS: Mapping[str, tuple[str, ...]] = {}
"""Adapter module -> the top-level modules it needs."""

MakeProgram = Callable[[Sizes], Step]
"""Axis sizes -> program."""


def missing() -> dict[str, tuple[str, ...]]:
    """Adapter -> the modules that it needs and that are not installed."""
    found = {name: tuple(m for m in needed if importlib.util.find_spec(m) is None) for name, needed in ADAPTERS.items()}
    return {name: modules for name, modules in found.items() if modules}


def programs() -> dict[str, MakeProgram]:
    """Name -> program, of every adapter whose packages are installed."""
    absent = missing()
    modules = [importlib.import_module(f"{__name__}.{name}") for name in ADAPTERS if name not in absent]
    return {f"{module.PACKAGE}: {name}": make for module in modules for name, make in module.PROGRAMS.items()}
