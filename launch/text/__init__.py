"""The user's own text as training data.

In: text files and a choice of tokenizer. Out: batches of tokens in a fixed order.
"""

from .documents import Documents, scan
from .text_batches import TextSource
from .text_workload import read, resize_vocab, use_text
from .token_cache import TokenizedText, prepare

__all__ = ["Documents", "TextSource", "TokenizedText", "prepare", "read", "resize_vocab", "scan", "use_text"]
