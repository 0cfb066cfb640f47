"""Which decoder `--decoder` means."""

import logging
from functools import cache

from wangen.generator.errors import UsageError
from wangen.runtime.decoders.base import FrameDecoder
from wangen.runtime.decoders.pyav import PYAV
from wangen.runtime.decoders.pynvvideocodec import PyNvVideoCodec
from wangen.runtime.decoders.torchcodec import TorchCodec
from wangen.runtime.rocm import on_cpu

log = logging.getLogger("wangen")

_BESIDE: dict[str, type[TorchCodec | PyNvVideoCodec]] = {kind.name: kind for kind in (TorchCodec, PyNvVideoCodec)}

DECODERS = (PYAV.name, *_BESIDE)
"""What can make an entry's frames; PyAV first."""


@cache
def open_decoder(name: str | None, device: str | None = None, local_rank: int = 0) -> FrameDecoder:
    """The decoder of a step. PyAV needs no torch.

    Args:
        name: as `--decoder` says it. None is PyAV; `auto` is torchcodec where the step computes on a GPU and torchcodec
            loads, else PyAV.
        device: as `--device` says it: a GPU decodes where it encodes.
        local_rank: number of this process on its machine.

    Raises:
        UsageError: the decoder cannot run here.
    """
    if name in (None, PYAV.name) or (name == "auto" and on_cpu(device)):
        return PYAV
    from wangen.runtime.devices import choose_device

    chosen = choose_device(device, local_rank)
    if name != "auto":
        return _BESIDE[str(name)].on(chosen)
    if chosen.type != "cuda":
        return PYAV
    try:
        decoder = TorchCodec.on(chosen)
    except UsageError as error:
        log.info("  decoding by PyAV: %s; %s", error.found, error.cure)
        return PYAV
    log.info("  decoding by torchcodec on %s", decoder.device)
    return decoder


def decoder_name(name: str | None, device: str | None, local_rank: int = 0) -> str:
    """The name of the decoder of a step; only `auto` has to look for it."""
    return open_decoder(name, device, local_rank).name if name == "auto" else name or PYAV.name
