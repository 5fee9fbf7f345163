"""Prediction of the per-device memory of a completed program, from XLA's fusion, scheduling and buffer assignment.

In: an `Assignment` and the donated inputs. Out: arguments, outputs, temporaries, aliased buffers and their lifetimes.
"""

from .usage import POINTER_BYTES, Usage, usage

__all__ = ["POINTER_BYTES", "Usage", "usage"]
