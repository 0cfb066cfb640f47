"""A tiny vision-language model with random weights: LLaVA of two layers, words `w0` … `w55`, with its processor."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "USER", "ASSISTANT", ":", *(f"w{n}" for n in range(56))]
TEMPLATE = (
    "{% for message in messages %}USER: {% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %} {{ part['text'] }}{% endif %}{% endfor %}{% endfor %} ASSISTANT:"
)


def write_tiny_vlm(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    """Write the model as transformers saves it; its answers depend on every picture."""
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**size, image_size=32, patch_size=16, projection_dim=16)
    text = LlamaConfig(**size, num_key_value_heads=2, vocab_size=len(WORDS), max_position_embeddings=512,
                       pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=4, image_token_id=4,
                         vision_feature_layer=-1, image_seq_length=4)  # fmt: skip
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():  # as they are initialised, pictures hardly count
            parameter.mul_(20.0) if parameter.dim() > 1 else None
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
            extra_special_tokens={"image_token": "<image>"},
        ),
        patch_size=16, vision_feature_select_strategy="default", num_additional_image_tokens=1, chat_template=template,
    ).save_pretrained(folder)  # fmt: skip
    return folder
