"""Decoding on an NVIDIA GPU by PyNvVideoCodec's SimpleDecoder.

It is written by the signatures of PyNvVideoCodec 2.2 and has not run on a GPU yet. Should its frames not have the
stamps that they are asked for by, PyAV takes the file, as with every decoder.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

from wangen.generator.errors import UsageError
from wangen.runtime.decoders.base import ByNumber, NotTakenError
from wangen.runtime.decoders.stamps import Stamps

if TYPE_CHECKING:
    import numpy as np
    import torch


class PyNvVideoCodec(ByNumber):
    """PyNvVideoCodec on one GPU; threads take turns, for it does not say that they may ask at once.

    Args:
        gpu: its number.
    """

    name = "pynvvideocodec"

    def __init__(self, gpu: int) -> None:
        super().__init__()
        self.gpu = gpu
        self._turn = Lock()

    @classmethod
    def on(cls, device: "torch.device") -> "Self":
        """PyNvVideoCodec on this GPU.

        Raises:
            UsageError: it is no NVIDIA GPU, or the package is not installed or does not load.
        """
        import torch

        if device.type != "cuda" or torch.version.hip:
            raise UsageError(f"--decoder pynvvideocodec needs an NVIDIA GPU, and the device is {device}",
                             cure="give --decoder pyav")  # fmt: skip
        try:
            import PyNvVideoCodec  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            raise UsageError(
                f"--decoder pynvvideocodec: it cannot be loaded: {str(error).partition(chr(10))[0]}",
                cure="pip install PyNvVideoCodec, let a container see the driver's video libraries "
                "(NVIDIA_DRIVER_CAPABILITIES=compute,utility,video), or give --decoder pyav",
            ) from None
        return cls(device.index or 0)

    def decode(
        self, path: Path, stamps: Stamps, rotation: int, numbers: Sequence[int]
    ) -> Iterator[tuple[float, "np.ndarray[Any, np.dtype[np.uint8]]"]]:
        """As `ByNumber.decode`."""
        import PyNvVideoCodec as nvc  # noqa: N813
        from torch.utils.dlpack import from_dlpack

        if rotation:
            raise NotTakenError("its picture is to be turned")
        with self._turn:
            video = nvc.SimpleDecoder(
                str(path), gpu_id=self.gpu, use_device_memory=True, output_color_type=nvc.OutputColorType.RGB
            )
            if len(video) != len(stamps.frames):
                raise NotTakenError("it counts other frames than there are time stamps")
        for first in range(0, len(numbers), self.at_a_time):
            with self._turn:
                batch = video.get_batch_frames_by_index(list(numbers[first : first + self.at_a_time]))
                copies = [(float(frame.getPTS()), from_dlpack(frame).cpu().numpy()) for frame in batch]
            yield from copies
