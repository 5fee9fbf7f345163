"""`auto`: a policy for `jax.checkpoint`, or the schedule of a `remat.scan`, whose choice `remat.fit` makes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax

from .checkpoint_schedule import Schedule
from .linearized_program import Key, key_of
from .policy import Policy, scan_key
from .sublinear import sqrt

Group = Hashable
"""Of blocks that are chosen together."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Auto:
    """A policy for `jax.checkpoint` that does what `remat.fit` has chosen, where its `step` runs; elsewhere it keeps
    nothing, as `jax.checkpoint` does.

    Example:
        >>> import jax
        >>> from jax import numpy as jnp
        >>> from sharding import remat
        >>> layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w), policy=remat.auto)
        >>> first, second = (jax.checkpoint(jnp.sin, policy=remat.auto[k]) for k in range(2))  # chosen separately
    """

    group: Group = None

    def __getitem__(self, group: Group) -> Auto:
        """The policy of blocks that are chosen apart from those of other groups."""
        return Auto(group)

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        return _in_force.value.of(self.group)(primitive, *avals, **params)

    def schedule(self, steps: int) -> Schedule | None:
        """The schedule of a `remat.scan`: by default `remat.sqrt`; None keeps the residuals of all steps."""
        return _in_force.value.of(self.group).schedule(steps)


auto = Auto()
"""The policy of blocks in no group."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What each group keeps."""

    policies: tuple[tuple[Group, Policy], ...] = ()

    def of(self, group: Group) -> Policy:
        """The policy of a group; one that is not listed keeps nothing."""
        return dict(self.policies).get(group, Policy())


@dataclass(eq=False, slots=True)
class Recorder:
    """A choice that keeps nothing, and records which values it is asked about.

    Equal to no other, so that JAX traces again and asks.
    """

    asked: dict[Group, dict[Key, None]] = field(default_factory=dict)
    """Group -> its values, in the order of the program."""

    def of(self, group: Group) -> Asked:
        """A policy that records the values of a group."""
        return Asked(self.asked.setdefault(group, {}))


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A policy that keeps nothing, and records what it is asked about."""

    keys: dict[Key, None]

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> bool:
        self.keys[key_of(primitive, avals, params)] = None
        return False

    def schedule(self, steps: int) -> Schedule | None:
        """Any schedule; records the scan."""
        self.keys[scan_key(steps)] = None
        return sqrt(steps)


_in_force: Any = jax.make_user_context(default_value=Choice())
"""The choice in force: part of all of JAX's cache keys."""


@contextmanager
def chosen(choice: Choice | Recorder) -> Iterator[None]:
    """What is traced inside follows a choice."""
    with _in_force(choice):
        yield
