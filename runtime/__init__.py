"""The half that needs torch: caching, training, generation. Installed from a clone with `pip install '.[runtime]'`."""
