"""The embedded example: real photos and a clip with captions, used by `wangen demo` and by the tests."""
