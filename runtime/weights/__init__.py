"""Checkpoints in every layout that people have -> diffusers and transformers modules.

Sizes are read from the tensors, never from a hub or a config file. A model is built without memory on the meta device
and its tensors are read into it one by one: at no time does a second copy exist. Files are judged by their headers
before a tensor is read, so a wrong file is named in milliseconds.

    reading        one tensor of any file into memory
    quantized      8-bit and GGUF weights that stay as they are stored
    filling        a checkpoint's tensors into a module
    transformer, vae, text_encoder, image_encoder, tokenizer
"""
