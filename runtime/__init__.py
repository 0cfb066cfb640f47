"""The half that needs torch: caching, training, generation. Installed from a clone with `pip install '.[runtime]'`."""

from wangen.generator.entry import begin_module

begin_module()  # before the imports below, which take most of the time in which Ctrl-C would not be heard

from wangen.runtime.memory.allocator import prefer_whole_segments  # noqa: E402

prefer_whole_segments()  # before anything asks for a GPU's memory, as some libraries do when they are imported
