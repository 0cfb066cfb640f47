"""`python -m wangen.runtime STEP …`: what the scripts call. It is `wangen STEP …`; help does not import torch."""

from wangen.generator.entry import entry

if __name__ == "__main__":
    entry()
