"""Options that choose the text of a language model and its tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from sharding.errors import ShardingError

from .option_checks import at_least

MIN_VOCAB = 257
"""Smallest BPE vocabulary: the 256 bytes and the end of a document."""


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Your own training text, for models that predict the next token."""

    files: Annotated[tuple[Path, ...], arg(name="data", metavar="FILE")] = ()
    """UTF-8 text files, or folders of them. Default: the model's own data, such as Python's standard library."""
    tokenizer: Literal["bytes", "bpe"] | None = None
    """One token per byte, or byte-pair encoding trained on the text at first use. Default: bpe with --data."""
    vocab: int | None = None
    """Maximum BPE vocabulary size. Default: 4096."""
    cache: Path | None = None
    """Folder that caches tokenized text between runs. Default: sharding/ in the user's cache folder."""

    def __post_init__(self) -> None:
        if self.vocab is not None:
            at_least("--vocab", self.vocab, MIN_VOCAB)
            if self.tokenizer == "bytes":
                raise ShardingError(
                    f"--vocab {self.vocab} --tokenizer bytes",
                    found="the byte tokenizer has 256 tokens",
                    required="a tokenizer with a trained vocabulary",
                    fix=["--tokenizer bpe", "leave --vocab out"],
                )

    @property
    def is_given(self) -> bool:
        """Whether any of the text, tokenizer or vocabulary replaces the model's own."""
        return bool(self.files or self.tokenizer or self.vocab)
