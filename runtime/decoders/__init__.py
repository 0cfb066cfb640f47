"""Ways from a video file to its frames: PyAV, and decoders that are installed beside it.

Every one gives the same frames: `base.py` picks them by the rules of PyAV's way and checks what comes. A further
decoder is one file with a `ByNumber`, and its name in `choice.py`.
"""
