"""From the bytes of a video file to some of its frames."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import av
import numpy as np
from gyre_daemon.transforms.recipes import Cost, Field, OfField, Sample
from msgspec import Meta

from gyre_media.geometry import Pixels, resized

_Length = Annotated[int, Meta(ge=1, le=1 << 14)]
# Containers that hold all of a video. Others, such as playlists, name files that would be opened.
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg"
# A frame further ahead is looked for from its key frame on. A shorter way would decode
# frames twice where key frames are rare; a longer one, frames without use.
_MAX_GAP_S = 2.0


@dataclass(frozen=True)
class DecodeVideo(OfField):
    """Decodes some frames of MP4, WebM, Matroska, AVI, MPEG and Ogg files.

    For each moment, the frame shown then. Where a video has ended, its last one.

    Attributes:
        field: the bytes of files, which samples no longer have afterwards.
        frames: how many are decoded.
        size: height and width that they are resized to, with antialiasing.
        to: uint8 [frames, height, width, 3].
        rate: of the frames, in Hz; 0 for those in the middle of that many equal parts of a video.
        start: with a rate, which part of a longer video: its `beginning`, its `center`, or a
            `random` one.
        max_pixels: a video whose frames have more is refused before it is decoded.
    """

    frames: Annotated[int, Meta(ge=1, le=4096)]
    size: tuple[_Length, _Length]
    to: str = "video"
    rate: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    start: Literal["beginning", "center", "random"] = "beginning"
    max_pixels: Annotated[int, Meta(ge=1, le=1 << 28)] = 4096 * 2304

    version: ClassVar[int] = 2  # 1 was resized by Pillow
    cost: ClassVar[Cost] = "slow"

    @property
    def is_random(self) -> bool:
        return self.rate > 0 and self.start == "random"

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        self.require_bytes(fields)
        return {self.to: Field(np.dtype(np.uint8), (self.frames, *self.size, 3))}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        data = io.BytesIO(sample.pop(self.field).data)
        made = out.get(self.to)
        if made is None:
            made = sample[self.to] = np.empty((self.frames, *self.size, 3), np.uint8)
        try:
            with av.open(data, options={"format_whitelist": _CONTAINERS}) as container:
                stream = next(iter(container.streams.video), None)
                if stream is None:
                    raise ValueError("it has no video")
                self._check_size(stream.width, stream.height)
                moments = self._moments(_seconds(container, stream), rng)
                for place, frame in enumerate(self._shown(container, stream, moments)):
                    made[place] = frame
        except (av.FFmpegError, EOFError) as error:
            raise ValueError(f"it is no video that can be decoded: {error}") from error

    def _moments(self, seconds: float, rng: np.random.Generator) -> list[float]:
        """When the frames are shown, from the beginning of the video on, in rising order."""
        if not self.rate:
            return [(place + 0.5) * seconds / self.frames for place in range(self.frames)]
        surplus = max(0.0, seconds - self.frames / self.rate)
        begin = {"beginning": 0.0, "center": surplus / 2}.get(self.start)
        if begin is None:
            begin = rng.uniform(0, surplus)
        return [begin + place / self.rate for place in range(self.frames)]

    def _shown(self, container: Any, stream: Any, moments: Sequence[float]) -> Iterator[Pixels]:
        """The frame of each moment, resized."""
        first = (stream.start_time or 0) * stream.time_base
        coming = container.decode(stream)
        shown, following = None, next(coming, None)
        for moment in moments:
            if following is not None and moment - _time(following, first) > _MAX_GAP_S:
                container.seek(int((moment + first) / stream.time_base), stream=stream)
                coming = container.decode(stream)
                following = next(coming, None) or shown
            while following is not None and _time(following, first) <= moment + 1e-6:
                shown, following = following, next(coming, None)
            shown = shown or following
            if shown is None:
                raise ValueError("it has no frame")
            self._check_size(shown.width, shown.height)
            pixels: Pixels = shown.to_ndarray(format="rgb24")
            yield resized(pixels, *self.size, "bilinear", antialias=True)

    def _check_size(self, width: int, height: int) -> None:
        if width * height > self.max_pixels:
            raise ValueError(
                f"it declares frames of {width} x {height} pixels; at most {self.max_pixels} are "
                "decoded (max_pixels)"
            )


def _seconds(container: Any, stream: Any) -> float:
    if stream.duration:
        return float(stream.duration * stream.time_base)
    if container.duration:
        return float(container.duration / av.time_base)
    raise ValueError("it does not say how long it is")


def _time(frame: Any, first: float) -> float:
    """When a frame is shown, from the beginning of the video on, in seconds."""
    return 0.0 if frame.pts is None else float(frame.pts * frame.time_base - first)
