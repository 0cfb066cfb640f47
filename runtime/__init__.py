"""The half that needs torch: caching, training and generation. Install it with `pip install 'wangen[runtime]'`."""
