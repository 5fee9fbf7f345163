"""The executables of a jitted function by cache key, the least recently used forgotten first."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from .. import compat
from .arguments import Arguments
from .cache_key import CacheKey, cache_key, changed_parts
from .current_mesh import AnyMesh
from .executable import Executable

MAX_EXECUTABLES = 256
"""Of one function. Each keeps its graph and compiled program."""

MAX_WAIT_SECONDS = 60.0
"""For another thread that makes the same executable; then it is made once more."""

_log = logging.getLogger("sharding")


class ExecutableCache:
    """Executables by cache key. Any number of threads may use it.

    JAX knows the cache, so that `jax.clear_caches()` clears it.
    """

    def __init__(self, function: str, on_clear: Callable[[], None]):
        self.function, self.on_clear = function, on_clear
        self.executables: OrderedDict[CacheKey, Executable] = OrderedDict()
        self._lock = threading.RLock()
        self._turns: WeakValueDictionary[CacheKey, _Turn] = WeakValueDictionary()
        compat.register_cache(self)

    def get(self, call: Arguments, mesh: AnyMesh) -> Executable | None:
        """The executable for a call, if any; logs what changed at level debug if none.

        Raises:
            TypeError: a leaf is neither an array nor a number, or a static argument is not hashable.
        """
        key = cache_key(mesh, call)
        with self._lock:
            found = self._found(key, call)
            if found is None and self.executables and _log.isEnabledFor(logging.DEBUG):
                parts = changed_parts(key, next(reversed(self.executables)), call)
                _log.debug("%s: cache miss: %s changed", self.function, "; ".join(parts))
        return found

    def made(self, call: Arguments, mesh: AnyMesh, make: Callable[[], Executable]) -> Executable:
        """The executable for a call that had none: made once, by the first of the threads that need it at once."""
        key = cache_key(mesh, call)
        with self._lock:
            turn = self._turns.setdefault(key, _Turn())
        with turn.taken():
            with self._lock:
                found = self._found(key, call)
            if found is None:
                found = make()
                self._put(call, mesh, found)
        return found

    def _found(self, key: CacheKey, call: Arguments) -> Executable | None:
        found = self.executables.get(key)
        if found is None:
            found = self._fitting(key, call)
            if found is not None:
                self.executables[key] = found
        if found is not None:
            self.executables.move_to_end(key)
        return found

    def _put(self, call: Arguments, mesh: AnyMesh, executable: Executable) -> None:
        """Adds the executable for a call, unless it closes over tracers, which do not outlive their trace."""
        if not self.keeps(executable):
            return
        with self._lock:
            self.executables[cache_key(mesh, call)] = executable
            self._limit()

    def _limit(self) -> None:
        while len(self.executables) > MAX_EXECUTABLES:
            oldest, found = next(iter(self.executables.items()))
            if found.ran_on_fast_path:  # which leaves this order alone
                found.ran_on_fast_path = False
                self.executables.move_to_end(oldest)
                continue
            del self.executables[oldest]
            self.on_clear()  # a fast path may hold it
            _log.debug("%s: forgot the least recently used of %d signatures", self.function, MAX_EXECUTABLES)

    def keeps(self, executable: Executable) -> bool:
        """Whether an executable may be used by later calls."""
        return not executable.traced.closes_over_tracers

    def cache_clear(self) -> None:
        """Forgets all executables; the name is that of `functools.lru_cache`, by which JAX calls it."""
        with self._lock:
            self.executables.clear()
            self.on_clear()

    def _fitting(self, key: CacheKey, call: Arguments) -> Executable | None:
        """An executable for the same shapes that accepts these shardings: the second step of a loop."""
        for other, entry in self.executables.items():
            if other[:-1] == key[:-1] and all(a[:3] == b[:3] for a, b in zip(other.leaves, key.leaves, strict=True)):
                if entry.accepts(call.leaves):
                    return entry
        return None


class _Turn:
    """The turn of one thread to make an executable, while others wait for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Waits for the turn; not forever, as two functions that call each other may wait for one another."""
        is_taken = self._lock.acquire(timeout=MAX_WAIT_SECONDS)
        try:
            yield
        finally:
            if is_taken:
                self._lock.release()
