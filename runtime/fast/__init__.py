"""Exact fast paths, on the library's weights; diffusers, transformers and peft are the oracle in the tests.

Those of the encoders import none of them: the first latent is there before they would be loaded. That of the
transformer (`dit*.py`) works on diffusers' module with peft's adapters in it.
"""
