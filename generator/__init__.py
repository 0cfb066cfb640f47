"""The torch-free half of wangen: datasets in, published bundles of scripts and TOML files out."""
