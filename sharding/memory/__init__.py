"""What a device holds while a completed program runs: the program as one device runs it, fused, ordered and stored."""

from .usage import POINTER_BYTES, Usage, usage

__all__ = ["POINTER_BYTES", "Usage", "usage"]
