"""`Policy`: which values a `jax.checkpoint` keeps or offloads, and the snapshots of a `remat.scan`, as data."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from .checkpoint_schedule import Schedule
from .linearized_program import Key, key_of
from .revolve import revolve
from .sublinear import sqrt

EVERYTHING: Key = ("everything",)
"""In place of a value: all values are kept, as without `jax.checkpoint`."""


SCAN = "remat.scan"


def scan_key(steps: int) -> Key:
    """The key of the schedule of scans over so many steps."""
    return (SCAN, steps)


@dataclass(frozen=True)
class Policy:
    """A policy for `jax.checkpoint`: keeps the values of some ops, named or not, and offloads others to the host."""

    saved: frozenset[Key] = frozenset()
    offloaded: frozenset[Key] = frozenset()
    snapshots: tuple[tuple[Key, int], ...] = ()
    """Of scans, by `scan_key`."""

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        if EVERYTHING in self.saved:
            return True
        return self.action(key_of(primitive, avals, params))

    def action(self, key: Key) -> Any:
        """What JAX does with a value: True keeps it, False runs its op again, an `Offloadable` moves it to the host."""
        return _to_host() if key in self.offloaded else key in self.saved

    def schedule(self, steps: int) -> Schedule | None:
        """The schedule of a scan; None keeps the residuals of all steps."""
        key = scan_key(steps)
        if {EVERYTHING, key} & self.saved:
            return None
        count = dict(self.snapshots).get(key)
        return sqrt(steps) if count is None else revolve(steps, count)

    def __str__(self) -> str:
        parts = {"keeps": self.saved, "offloads": self.offloaded}
        texts = [f"{verb} {', '.join(sorted(map(label, keys)))}" for verb, keys in parts.items() if keys]
        texts += [f"{label(key)} with {count} snapshots" for key, count in self.snapshots]
        return "; ".join(texts) or "keeps nothing"


def label(key: Key) -> str:
    """A value as users know it: its name, or its op and operands, as `dot_general float32[8,16] float32[16,4]`."""
    if key == EVERYTHING:
        return "everything"
    if key[0] == "name":
        return key[1]
    if key[0] == SCAN:
        return f"scan of {key[1]} steps"
    return " ".join([key[0], *(f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in key[1])])


@functools.cache
def _to_host() -> Any:
    """JAX's mark of a value to offload, which only its own policies make."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    (equation,) = jax.make_jaxpr(lambda x: checkpoint_name(x, "x"))(0.0).eqns
    return policy(equation.primitive, name="x")
