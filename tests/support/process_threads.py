"""Processes as threads, with a key-value store in the place of the coordinator's: messages without a second Python."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from sharding import compat
from sharding.distributed import processes

LIMIT_BYTES = 4 << 20
"""Of a message, as gRPC has it."""


class Store:
    """The part of JAX's distributed client that processes exchange messages with."""

    def __init__(self):
        self.values = {}
        self.changed = threading.Condition()

    def key_value_set(self, key, value):
        assert len(value.encode()) <= LIMIT_BYTES
        with self.changed:
            assert key not in self.values, "a key is written once"
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise TimeoutError(f"DEADLINE_EXCEEDED: {key}\nof the store")
            return self.values[key]


class _CallNumbers(threading.local):
    """Each process counts its own calls."""

    def __init__(self):
        self.numbers = itertools.count()

    def __next__(self):
        return next(self.numbers)


def run(monkeypatch, function, count):
    """What `function(index)` returns, or the error that it raises, in each of some processes."""
    here, store = threading.local(), Store()
    monkeypatch.setattr(compat, "distributed", lambda: here.state)
    monkeypatch.setattr(processes, "_call_numbers", _CallNumbers())

    def process(index):
        here.state = SimpleNamespace(client=store, process_id=index, num_processes=count)
        try:
            return function(index)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(process, range(count)))
