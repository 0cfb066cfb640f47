"""The environment of a bundle: its setup scripts, wangen's own wheel, and the PyTorch that fits the machine."""
