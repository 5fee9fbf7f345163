"""Programs that other people wrote, as their users would shard them: what predictions are held against.

In: packages from the registry, which the extra `corpus` installs. Some pin what they don't need here and are installed
without their dependencies: `pip install --no-deps maxtext gemma kauldron lark tensorboard mediapy dialog penzai gpjax
jax-md keras-hub kagglehub frozendict dynamax fastprogress==1.0.3 fastcore`; gemma also imports `tensorflow-cpu`,
`ipython` and `matplotlib`; distrax needs `tf_keras` beside TensorFlow.

Out: `programs()`, name -> a function from mesh axis sizes to a `Step` of shapes. Each adapter builds the package's own
model, loss and optimizer at a real size and shards the parameters and the batch; nothing else is changed. No array is
made.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType

from support.train_steps.step import Sizes, Step

MESHES: tuple[Sizes, ...] = ({"data": 2, "model": 4}, {"data": 2, "fsdp": 2, "model": 2}, {"data": 8, "model": 8})
"""Every program is built for each of these meshes."""

ADAPTERS: Mapping[str, tuple[str, ...]] = {
    "aqt_models": ("aqt", "flax"),
    "blackjax_kernels": ("blackjax",),
    "brax_agents": ("brax",),
    "diffrax_models": ("diffrax", "equinox"),
    "distrax_models": ("distrax", "haiku"),
    "dm_pix_vision": ("dm_pix", "haiku"),
    "dynamax_models": ("dynamax",),
    "e3nn_models": ("e3nn_jax", "flax"),
    "equimo_models": ("equimo", "equinox"),
    "equinox_models": ("equinox",),
    "equinox_vision": ("equinox",),
    "evosax_strategies": ("evosax",),
    "flashbax_agents": ("flashbax", "haiku"),
    "flax_linen_models": ("flax",),
    "flax_nnx_models": ("flax",),
    "flowjax_models": ("flowjax", "paramax", "equinox"),
    "gemma_models": ("gemma", "kauldron", "mediapy", "lark", "dialog", "tensorboard", "tensorflow", "IPython"),
    "gpjax_models": ("gpjax", "equinox"),
    "haiku_models": ("haiku",),
    "haiku_vision": ("haiku",),
    "jax_md_simulations": ("jax_md",),
    "jaxopt_solvers": ("jaxopt",),
    "jraph_models": ("jraph", "haiku"),
    "keras_hub_models": ("keras_hub", "keras"),
    "keras_models": ("keras",),
    "linax_models": ("linax", "equinox"),
    "maxtext_models": ("maxtext", "pathwaysutils", "tokamax", "drjax", "tiktoken", "aqt", "yaml"),
    "mctx_agents": ("mctx", "haiku"),
    "mjx_rollouts": ("mujoco", "trimesh"),
    "numpyro_models": ("numpyro",),
    "optax_steps": ("optax",),
    "optimistix_solvers": ("optimistix", "lineax"),
    "ott_solvers": ("ott",),
    "penzai_models": ("penzai", "ordered_set"),
    "qwix_models": ("qwix",),
    "rlax_agents": ("rlax", "haiku"),
    "tinygp_models": ("tinygp",),
    "tunix_models": ("tunix", "qwix"),
}
"""Adapter module -> the top-level modules it needs."""

os.environ.setdefault("EQX_ON_ERROR", "nan")  # equinox' checks: callbacks don't lower for compile-only devices
os.environ.setdefault("KERAS_BACKEND", "jax")

MakeProgram = Callable[[Sizes], Step]
"""Axis sizes -> program."""


def missing() -> dict[str, tuple[str, ...]]:
    """Adapter -> the modules that it needs and that are not installed."""
    found = {name: tuple(m for m in needed if importlib.util.find_spec(m) is None) for name, needed in ADAPTERS.items()}
    return {name: modules for name, modules in found.items() if modules}


def adapter(name: str) -> ModuleType:
    """An adapter whose packages are installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of the packages
        return importlib.import_module(f"{__name__}.{name}")


def programs() -> dict[str, MakeProgram]:
    """Name -> program, of every adapter whose packages are installed."""
    absent = missing()
    modules = [adapter(name) for name in ADAPTERS if name not in absent]
    return {f"{module.PACKAGE}: {name}": make for module in modules for name, make in module.PROGRAMS.items()}
