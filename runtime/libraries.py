"""What the transformer takes from diffusers and peft. Imported from here, it is loaded in less than a second."""

import wangen.runtime.lean  # noqa: F401  # first: it loads the two libraries

# isort: split
from diffusers.models.embeddings import TimestepEmbedding
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel, WanTransformerBlock
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftConfig
from peft.tuners.loha.layer import make_weight
from peft.tuners.lokr.layer import factorization, make_kron
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer

__all__ = [
    "BaseTunerLayer",
    "LoHaConfig",
    "LoKrConfig",
    "LoraConfig",
    "LoraLinear",
    "PeftConfig",
    "TimestepEmbedding",
    "WanTransformer3DModel",
    "WanTransformerBlock",
    "factorization",
    "make_kron",
    "make_weight",
]
