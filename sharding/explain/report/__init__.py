"""The report: one HTML page of a completed program, to see before it runs."""

from .contents import contents
from .page import frame, page

__all__ = ["contents", "frame", "page"]
