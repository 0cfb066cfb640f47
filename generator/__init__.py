"""The torch-free half of wangen: datasets in, published bundles of scripts and TOML files out."""

COMPLETE = "_WANGEN_COMPLETE"
"""A shell that asks for completions of `wangen` sets this environment variable, and gives no words."""
