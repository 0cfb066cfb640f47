"""Exact fast paths of the encoders, on the library's weights; diffusers and transformers are the oracle in the tests.

Nothing here imports diffusers, transformers or accelerate: the first latent is there before they would be loaded.
"""
