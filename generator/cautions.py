"""Clips that are not trained as people see them: said once for a dataset, by `check` and before caching.

They are used as stored. Filters that map tones or join half pictures, and decoders that see what is transparent, are
not in every build of ffmpeg, and what a cache holds must not depend on the build.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from wangen.generator.dataset import MediaFacts, media_of
from wangen.generator.errors import many, printable, some

_TO_SDR = (
    'ffmpeg -i IN -vf "zscale=t=linear:npl=100,format=gbrpf32le,zscale=p=bt709,tonemap=hable:desat=0,'
    'zscale=t=bt709:m=bt709:r=tv,format=yuv420p" -crf 12 OUT.mp4'
)
_OVER_WHITE = (
    'ffmpeg -i IN -vf "format=rgba,split[a][b];[a]format=rgb24,lutrgb=r=255:g=255:b=255[w];[w][b]overlay=format=rgb" '
    "-pix_fmt yuv420p -crf 12 OUT.mp4"
)
_WHOLE_PICTURES = "ffmpeg -i IN -vf bwdif=mode=send_frame -crf 12 OUT.mp4"

_CAUTIONS = {
    "hdr": "{} in HDR ({}), and their colours are taken as stored, pale and flat: export them as SDR, or convert each: "
    + _TO_SDR,
    "transparent": "{} transparent ({}), and the colours that lie beneath are taken: export them over a background, or "
    "convert each (-c:v libvpx-vp9 before -i for a .webm): " + _OVER_WHITE,
    "interlaced": "{} interlaced ({}): where edges that move look like combs, these combs are learned; convert each: "
    + _WHOLE_PICTURES,
}
"""What is said by the fact that is true of a clip: how many there are, and the first names."""


def clip_cautions(facts: Mapping[Path, MediaFacts]) -> Iterator[str]:
    """What is to be said of the clips among media, with what to do.

    Args:
        facts: of the files of a dataset.
    """
    clips = {path: known for path, known in facts.items() if media_of(path) == "video"}
    for fact, text in _CAUTIONS.items():
        if names := sorted(printable(path.name) for path, known in clips.items() if getattr(known, fact)):
            yield text.format(many(len(names), "clip is", "clips are"), some(names))
