"""Options that choose a model: `--model` and the changes to its preset."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import arg

from .option_checks import given_options

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A preset and changes to it."""

    name: Annotated[str, arg(name="model")] = "gpt-tiny"
    """Preset: {gpt,gpt-moe,bert,resnet,vit,dlrm}-tiny train in minutes;
    gpt-small, gpt-xl, gpt-7b, gpt3-175b, gpt-moe-{2b,140b,1t}, bert-base, bert-large, resnet-18, resnet-50, vit-b16,
    vit-h14, dlrm-large."""
    dtype: Dtype | None = None
    """Dtype of activations; parameters stay float32. Default: the preset's."""
    dropout: float | None = None
    """Dropout rate. Default: the preset's."""
    kv_heads: int | None = None
    """Number of key/value heads (grouped-query attention). Default: the preset's."""
    kernels: Literal["auto", "xla", "pallas"] | None = None
    """Attention and norms of transformers: Pallas kernels (interpreted on CPUs), plain JAX, or what the platform runs
    fastest. Default: auto."""
    remat: bool = False
    """Rematerialize each block in the backward pass instead of saving its activations."""
    scan: bool = False
    """Stack the layers and scan over them: one block is compiled whatever the depth."""

    def changes(self) -> dict[str, Any]:
        """The fields of the model's configuration that differ from the preset."""
        options = given_options(self)
        changes = {
            name: value for name, value in options.items() if name in ("dtype", "dropout", "kernels", "kv_heads")
        }
        return changes | {name: True for name in ("remat", "scan") if getattr(self, name)}
