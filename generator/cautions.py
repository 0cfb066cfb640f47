"""Clips whose colours are not trained as people see them: said once for a dataset, by `check` and before caching.

They are used as stored: filters that map tones, and decoders that see what is transparent, are not in every build of
ffmpeg, and what a cache holds must not depend on the build.
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


def colour_cautions(facts: Mapping[Path, MediaFacts]) -> Iterator[str]:
    """What is to be said of media, with what to do; of pictures nothing.

    Args:
        facts: of the files of a dataset.
    """
    clips = {path: known for path, known in facts.items() if media_of(path) == "video"}
    if hdr := sorted(printable(path.name) for path, known in clips.items() if known.hdr):
        yield (
            f"{many(len(hdr), 'clip is', 'clips are')} in HDR ({some(hdr)}), and their colours are taken as stored, "
            f"pale and flat: export them as SDR, or convert each: {_TO_SDR}"
        )
    if transparent := sorted(printable(path.name) for path, known in clips.items() if known.transparent):
        yield (
            f"{many(len(transparent), 'clip is', 'clips are')} transparent ({some(transparent)}), and the colours that "
            f"lie beneath are taken: export them over a background, or convert each (-c:v libvpx-vp9 before -i for a "
            f".webm): {_OVER_WHITE}"
        )
