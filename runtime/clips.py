"""Clip files: H.264 in mp4 with an exact frame rate, or plain pixels in .npz. Written whole or not at all.

Frames are (H, W, 3) uint8 in RGB; an array of them is (T, H, W, 3).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wangen.generator.errors import WangenError
from wangen.generator.files import replace, temporary_beside

if TYPE_CHECKING:
    import numpy as np

    Frame = np.ndarray[Any, np.dtype[np.uint8]]
    Frames = np.ndarray[Any, np.dtype[np.uint8]]

BT709 = 1
"""Of matrix, primaries and transfer, as H.264 counts (ITU-T H.273): said in the file, so that every player agrees."""
LIMITED = 1
"""Luma from 16 to 235, which is what every player expects of H.264."""

NPZ_BYTES = 1000
"""Of a .npz beside its pixels, about."""


def write_mp4(path: Path, frames: "Sequence[Frame]", fps: int, crf: int) -> None:
    """Write frames as H.264 with 4:2:0 colours, without sound: the same frames give the same bytes.

    Args:
        path: the file to make or replace.
        frames: each (H, W, 3) uint8, H and W even.
        fps: frame k is on screen from k / fps to (k + 1) / fps seconds.
        crf: x264's constant rate factor, 0 (best) … 51.

    Raises:
        WangenError: the encoder refuses the frames.
        OSError: the disk refused.
    """
    # The bytes would depend on the number of threads; and with x264's macroblock tree they differ now and then from one
    # run to the next, in pictures of some sizes.
    x264 = {"crf": str(crf), "preset": "veryfast", "threads": "1", "x264-params": "mbtree=0"}
    with _whole(path) as temporary:
        encode(temporary, frames, fps, x264, bt709=True)


def encode(
    path: Path, frames: "Sequence[Frame] | Frames", fps: int, x264: Mapping[str, str], *, bt709: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Encode frames into a file, which is not whole before the call returns.

    Args:
        path: the file to make or replace.
        frames: each (H, W, 3) uint8, H and W even.
        fps: frames per second.
        x264: its options.
        bt709: convert the colours by BT.709 and say so in the file; else as ffmpeg does by itself.
        metadata: texts stored in the file.

    Raises:
        WangenError: the encoder refuses the frames.
        OSError: the disk refused.
    """
    import av

    kept = {} if metadata is None else {"movflags": "use_metadata_tags"}
    try:
        with av.open(str(path), "w", format="mp4", options=kept) as container:
            container.metadata.update(metadata or {})
            stream = container.add_stream("libx264", rate=Fraction(fps), options=dict(x264))
            stream.height, stream.width = frames[0].shape[:2]
            stream.pix_fmt = "yuv420p"
            if bt709:
                codec = stream.codec_context
                codec.colorspace = codec.color_primaries = codec.color_trc = BT709
                codec.color_range = LIMITED
            for frame in frames:
                picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
                if bt709:
                    limited = {"src_color_range": "JPEG", "dst_color_range": "MPEG"}
                    picture = picture.reformat(format="yuv420p", dst_colorspace="ITU709", **limited)
                container.mux(stream.encode(picture))
            container.mux(stream.encode())
    except av.FFmpegError as error:
        if isinstance(error, OSError):  # a full disk: the edge of the step says it
            raise
        raise WangenError(f"cannot be encoded: {error}", where=str(path)) from None


def write_npz(path: Path, frames: "Sequence[Frame]", fps: int) -> None:
    """Write frames as `frames` (T, H, W, 3) uint8 and `fps` in a .npz, which `numpy.load` reads without pickle.

    The pixels are stored as they are: compressing real footage saves a fifth and takes twenty times as long.

    Raises:
        OSError: the disk refused.
    """
    import numpy as np

    with _whole(path) as temporary, temporary.open("wb") as file:
        np.savez(file, frames=np.stack(frames), fps=np.int64(fps))


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends well, and is gone when it does not."""
    temporary = temporary_beside(path)
    try:
        yield temporary
        replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
