"""A LoRA training loop as one writes it with diffusers and peft alone: what the product's own step is measured against.

It is right where loops in circulation are wrong (flow matching, no gradient into the inputs, AdamW on the adapter only,
clipping), and does nothing else: no data loader, no logging.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from torch import Tensor

LINEARS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
TOY = {
    "num_attention_heads": 4,
    "attention_head_dim": 128,
    "ffn_dim": 2048,
    "num_layers": 8,
    "text_dim": 4096,
    "freq_dim": 256,
}
"""38 million parameters."""


@dataclass(frozen=True)
class Item:
    """One cached sample: latents (1, 16, F, h, w) and a text (L, 4096) without padding."""

    latents: Tensor
    text: Tensor


def toy_model(dtype: torch.dtype = torch.float32, *, rank: int = 16) -> WanTransformer3DModel:
    """The toy model with random weights, and an adapter in float32 on the ten linear layers of each block."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(**TOY).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if not any(part in name for part in WanTransformer3DModel._keep_in_fp32_modules):
            parameter.data = parameter.data.to(dtype)
    return with_adapter(model, LINEARS, rank)


def with_adapter(model: Any, targets: str | list[str], rank: int = 16) -> Any:
    """A frozen model with an adapter in float32 whose second halves are not zero."""
    model.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=targets))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.01)
    return model.train()


def toy_item() -> Item:
    """The latents of one picture of 256 x 256, and a caption of as many rows as captions have on average."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(1, 16, 1, 32, 32, generator=generator)
    return Item(latents, torch.randn(46, 4096, generator=generator) * 0.1)


class PlainLoop:
    """Steps on one item.

    Args:
        model: from `toy_model`.
        checkpointing: diffusers' gradient checkpointing.
        autocast: compute in bfloat16 under autocast.
    """

    def __init__(self, model: WanTransformer3DModel, *, checkpointing: bool = False, autocast: bool = False) -> None:
        self.model = model
        self.autocast = autocast
        if checkpointing:
            model.enable_gradient_checkpointing()
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4)
        self.generator = torch.Generator().manual_seed(2)

    def loss(self, item: Item) -> Tensor:
        """The loss of one item at a random noise and timestep."""
        noise = torch.randn(item.latents.shape, generator=self.generator)
        sigma = torch.rand((), generator=self.generator)
        text = torch.zeros(1, 512, item.text.shape[1])
        text[0, : len(item.text)] = item.text
        noisy = (1 - sigma) * item.latents + sigma * noise
        dtype = self.model.patch_embedding.weight.dtype
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            predicted = self.model(noisy.to(dtype), 1000 * sigma[None], text.to(dtype), return_dict=False)[0]
        return torch.nn.functional.mse_loss(predicted.float(), noise - item.latents)

    def step(self, item: Item) -> None:
        """One optimizer step."""
        self.loss(item).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(items: Sequence[Item], num_steps: int) -> WanTransformer3DModel:
    """The loop itself."""
    loop = PlainLoop(toy_model())
    for number in range(num_steps):
        loop.step(items[number % len(items)])
    return loop.model
