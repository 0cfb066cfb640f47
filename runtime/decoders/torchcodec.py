"""Decoding by torchcodec, in its exact mode: on a GPU where its wheel is built for CUDA, else on the CPU."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import local
from typing import TYPE_CHECKING, Any, Self

from wangen.generator.errors import UsageError
from wangen.runtime.decoders.base import ByNumber, NotTakenError
from wangen.runtime.decoders.stamps import Stamps
from wangen.runtime.sources import state_of

if TYPE_CHECKING:
    import numpy as np
    import torch

log = logging.getLogger("wangen")


class TorchCodec(ByNumber):
    """torchcodec on one device. On a CPU it gives the bytes that PyAV gives.

    Args:
        device: where it decodes.
    """

    name = "torchcodec"

    def __init__(self, device: "torch.device") -> None:
        super().__init__()
        self.device = device
        self._kept = local()

    @classmethod
    def on(cls, device: "torch.device") -> "Self":
        """The one that decodes where a step computes, if its wheel is built for that.

        Raises:
            UsageError: it is not installed, or does not load.
        """
        import torch

        try:
            import torchcodec
            import torchcodec.decoders
        except (ImportError, OSError, RuntimeError) as error:
            reason = str(error).partition("\n")[0].removesuffix(" Likely causes:")
            raise UsageError(
                f"--decoder torchcodec: it cannot be loaded: {reason}",
                cure="pip install torchcodec (0.13 where PyTorch has no CUDA) and FFmpeg's shared libraries, or give "
                "--decoder pyav",
            ) from None
        if device.type == "cuda" and "+cu" not in torchcodec.__version__:
            log.warning("  torchcodec %s is not built for CUDA: it decodes on the CPU", torchcodec.__version__)
            device = torch.device("cpu")
        return cls(device if device.type == "cuda" else torch.device("cpu"))

    def decode(
        self, path: Path, stamps: Stamps, rotation: int, numbers: Sequence[int]
    ) -> Iterator[tuple[float, "np.ndarray[Any, np.dtype[np.uint8]]"]]:
        """As `ByNumber.decode`."""
        import torch

        try:
            video = self._video(path, stamps.stream)
            if len(video) != len(stamps.frames):
                raise NotTakenError("it counts other frames than there are time stamps")
            # Before 0.11 it turns nothing and does not say so; other than quarters it does not turn as PyAV does.
            turned = getattr(video.metadata, "rotation", None) or 0
            if turned != rotation or rotation % 90 or (rotation and self.device.type != "cpu"):
                raise NotTakenError("its picture is to be turned")
            for first in range(0, len(numbers), self.at_a_time):
                batch = video.get_frames_at(list(numbers[first : first + self.at_a_time]))
                yield from zip((batch.pts_seconds / float(stamps.tick)).tolist(), batch.data.cpu().numpy(), strict=True)
        except torch.OutOfMemoryError:
            raise MemoryError from None

    def _video(self, path: Path, stream: int) -> Any:
        """The decoder of a file. Each thread keeps the last one: the exact mode reads the whole file to open it."""
        from torchcodec.decoders import VideoDecoder

        file = (path, state_of(path), stream)
        if getattr(self._kept, "file", None) != file:
            self._kept.file = self._kept.video = None
            self._kept.video = VideoDecoder(
                path, stream_index=stream, dimension_order="NHWC", num_ffmpeg_threads=0,
                device=self.device, seek_mode="exact",
            )  # fmt: skip
            self._kept.file = file
        return self._kept.video
