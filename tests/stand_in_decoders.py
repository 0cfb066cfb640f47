"""Stand-ins for decoders that need a GPU, or that are not installed; PyAV decodes for them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from wangen.runtime.decoders.base import ByNumber
from wangen.runtime.decoders.pyav import upright
from wangen.runtime.decoders.stamps import Stamps
from wangen.runtime.numbered_frames import numbered_frames


class StandIn(ByNumber):
    """Frames as PyAV decodes them, white on black for black on white, so that they tell whose they are."""

    name = "torchcodec"
    errors = (RuntimeError,)
    late_from = 1000

    @classmethod
    def on(cls, _device: torch.device) -> "StandIn":
        return cls()

    def decode(
        self, path: Path, stamps: Stamps, rotation: int, numbers: Sequence[int]
    ) -> Iterator[tuple[float, np.ndarray]]:
        assert list(numbers) == sorted(set(numbers))
        for number in numbers:
            (frame,) = numbered_frames(path, range(number, number + 1))
            yield frame.pts + (number >= self.late_from), 255 - np.asarray(upright(frame))


class DecodedFrame:
    """As PyNvVideoCodec 2.2 binds it, of a tensor in host memory."""

    def __init__(self, pts: int, pixels: np.ndarray) -> None:
        self._pts = pts
        self._tensor = torch.from_numpy(pixels.copy())

    def getPTS(self) -> int:  # noqa: N802
        return self._pts

    def __dlpack__(self, stream: Any = None) -> Any:
        return self._tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()


class SimpleDecoder:
    """With the parameters and methods of PyNvVideoCodec 2.2.4's, over PyAV."""

    made: list[dict[str, Any]] = []  # noqa: RUF012
    lag = 0

    def __init__(
        self, enc_file_path, gpu_id=0, cuda_context=0, cuda_stream=0, use_device_memory=True, max_width=0,
        max_height=0, need_scanned_stream_metadata=0, decoder_cache_size=4, output_color_type="NATIVE",
        bWaitForSessionWarmUp=False, enableDecodeStats=False,  # noqa: N803
    ) -> None:  # fmt: skip
        assert isinstance(enc_file_path, str)
        self.made.append({"gpu": gpu_id, "device": use_device_memory, "color": output_color_type})
        with av.open(enc_file_path) as container:
            self._frames = [(frame.pts, np.asarray(frame.to_image())) for frame in container.decode(video=0)]

    def __len__(self) -> int:
        return len(self._frames)

    def get_batch_frames_by_index(self, indices: list[int]) -> list[DecodedFrame]:
        if max(indices) + self.lag >= len(self._frames):
            raise IndexError("out of range")
        return [DecodedFrame(*self._frames[index + self.lag]) for index in indices]
