"""A user's own text as tokens to train on: read and checked, tokenized once into files, served in a fixed order."""

from .cache import TokenizedText, prepare
from .documents import Documents, scan
from .source import TextSource
from .task import fitted, over, read

__all__ = ["Documents", "TextSource", "TokenizedText", "fitted", "over", "prepare", "read", "scan"]
