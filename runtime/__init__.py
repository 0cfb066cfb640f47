"""The half that needs torch: caching, training, generation. Installed from a clone with `pip install '.[runtime]'`."""

from wangen.runtime.memory.allocator import prefer_whole_segments

prefer_whole_segments()  # before anything asks for a GPU's memory, as some libraries do when they are imported
