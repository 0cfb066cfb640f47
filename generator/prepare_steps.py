"""The steps that make a dataset out of raw footage and of raw robot data."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from wangen.generator.table import Step, flag

ClipFormat = Literal["mp4", "npz"]


@dataclass(frozen=True, kw_only=True)
class Preprocess(Step):
    """Cut long videos into training clips with manifests and a contact sheet; what is left out is listed with why."""

    command: ClassVar[str] = "preprocess"
    module: ClassVar[str] = "wangen.runtime.preprocess"

    videos: Path = flag("folder of videos, searched with the folders in it; nothing in it is changed",
                        names=("input", "video_directory"))  # fmt: skip
    output: Path = flag("folder for clips, manifests and the contact sheet", names=("output_dir",))
    labels: Path | None = flag(
        "table of labels, .csv or .jsonl: video (or path), prompt or label, and if wanted start_s and end_s", None
    )
    prompt_template: str = flag(
        "prompt of a label, or of a video without a caption whose folder is its class", "{label}", pinned=True
    )
    default_prompt: str | None = flag("prompt of videos that have no other (default: they are listed, not used)", None)
    task: str = flag("model profile that the clips are for", "t2v-14B", pinned=True, model_choices=True)
    resolution: str | None = flag("size of the clips, such as 832x480 (default: the model's)", None)
    fps: int | None = flag("frames per second of the clips (default: the model's)", None)
    frames: int | None = flag("frames of a clip, 4n+1 (default: the model's)", None,
                              names=("num_frames", "target_frames"))  # fmt: skip
    stride: int | None = flag("frames from the start of a clip to that of the next (default: no overlap)", None)
    format: ClipFormat = flag("mp4 (H.264) or npz (plain pixels, 97 MB for 81 frames of 832x480)", "mp4", pinned=True)
    crf: int = flag("quality of mp4 clips, as x264 counts: 0 loses nothing, 51 is the worst", 12, pinned=True)
    val_share: float = flag("share of the videos whose clips go to val.jsonl; 0 for none", 0.1, pinned=True)
    seed: int = flag("which videos these are", 42, pinned=True)
    cut_threshold: float = flag("a cut is where ffmpeg's scdet scores at least this, of 100", 10.0, pinned=True)
    max_freeze: float = flag("drop a clip in which the picture stands still for longer, in seconds", 1.0, pinned=True)
    max_black: float = flag("drop a clip of which more than this share is black", 0.1, pinned=True)
    max_blur: float = flag("drop a clip that ffmpeg's blurdetect calls more blurred: 5 is sharp, 12 a smear", 13.0,
                           pinned=True)  # fmt: skip
    min_motion: float = flag("drop a clip whose pixels change less from frame to frame, in percent of white", 0.02,
                             pinned=True)  # fmt: skip
    min_difference: float = flag(
        "drop a clip that nowhere differs more from an earlier one, in grey levels of 255 between thumbnails; 0 keeps "
        "copies", 16.0, pinned=True,
    )  # fmt: skip
    keep_all: bool = flag("keep what these limits would drop; the signals are written all the same", False, pinned=True)
    num_workers: int | None = flag("clips and videos worked on at a time (default: one for each core, at most 8)", None)
    dry_run: bool = flag("say what would be made, how large it is and how long it takes; write nothing", False)


@dataclass(frozen=True, kw_only=True)
class WorldModel(Step):
    """Write a manifest of clips for the raw 1X World Model data, which are read out of its shards as they are."""

    command: ClassVar[str] = "world_model"
    module: ClassVar[str] = "wangen.runtime.world_model"

    source: Path = flag("folder of the raw data: that of a split, with its metadata.json, or the one above both",
                        names=("dataset_path",))  # fmt: skip
    output: Path = flag("folder for the manifest, train.jsonl or val.jsonl", names=("output_dir",))
    split: Literal["train", "val"] = flag("train_v2.0_raw or val_v2.0_raw", "train",
                                          pinned=True)  # fmt: skip
    frames: int = flag("frames of a clip, 4n+1", 77, pinned=True, names=("num_frames", "target_frames", "clip_length"))
    temporal_downsample: int = flag("take every Nth frame of a segment; --frames of them are a clip", 1,
                                    pinned=True, names=("downsampled",))  # fmt: skip
    stride: int | None = flag(
        "frames of the video from the start of a clip to that of the next (default: no overlap)", None,
        names=("window_size",),
    )  # fmt: skip
    caption: str = flag("caption of every clip", "", pinned=True)
    overwrite: bool = flag("replace a manifest that has other lines", False)
