"""The half that needs torch: caching, training, generation. Installed from a clone with `pip install '.[runtime]'`."""

from wangen.generator.entry import refuse_module
from wangen.runtime.memory.allocator import prefer_whole_segments

refuse_module()
prefer_whole_segments()  # before anything asks for a GPU's memory, as some libraries do when they are imported
