"""`wangen publish` and `wangen clean`: a dataset folder -> the bundle of each target, and what wangen wrote removed."""
