"""Sound and video through a real daemon: what it serves is what the libraries decode."""

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import torch
from gyre_client import Loader
from gyre_client.errors import CorruptSample

RATE, NUM = 16_000, 5


def sounds() -> list[np.ndarray[Any, Any]]:
    """Tones of several lengths, int16."""
    return [
        (8000 * np.sin(np.arange(3000 + 700 * each) * (0.1 + 0.1 * each))).astype(np.int16)
        for each in range(NUM)
    ]


def test_sounds_are_served_in_their_lengths_and_as_spectrograms(tmp_path: Path) -> None:
    folder = tmp_path / "sounds"
    folder.mkdir()
    for number, each in enumerate(sounds()):
        soundfile.write(folder / f"{number}.flac", each, RATE)
    decode = {"name": "decode_audio", "field": "file", "rate": RATE}
    arguments: dict[str, Any] = {"batch_size": NUM, "order": "sequential", "format": "files"}
    with Loader(folder, transform=[decode], **arguments) as loader:
        batch = next(loader)
    wanted = [each.astype(np.float32) / 32768 for each in sounds()]
    assert batch["audio.offsets"].tolist() == np.cumsum([0, *map(len, wanted)]).tolist()
    assert np.array_equal(batch["audio"].numpy(), np.concatenate(wanted))
    crop = {"name": "crop_or_pad", "field": "audio", "length": 4000, "start": "random"}
    chain = [decode, crop, {"name": "log_mel", "rate": RATE}]
    with Loader(folder, transform=chain, **arguments) as loader:
        spectrum = next(loader)["audio"]
    assert spectrum.shape == (NUM, 80, 4000 // 160 + 1)
    assert len(np.unique(spectrum.numpy().argmax(axis=1)[:, 12])) == NUM  # each has its own tone
    (folder / "3.flac").write_bytes(b"fLaC" + bytes(90))
    with (
        Loader(folder, transform=chain, **arguments) as loader,
        pytest.raises(
            CorruptSample, match=r"sample 3 .*shard 3\.flac, byte 0\).*decode_audio: it is no sound"
        ) as caught,
    ):
        next(loader)
    assert (caught.value.facts["shard"], caught.value.facts["offset"]) == ("3.flac", "0")


def test_frames_of_videos_are_served(tmp_path: Path) -> None:
    folder = tmp_path / "videos"
    folder.mkdir()
    for number in range(2):
        buffer = io.BytesIO()
        with av.open(buffer, "w", format="mp4") as container:
            stream: Any = container.add_stream("libx264", rate=10)
            stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
            stream.options = {"qp": "0"}
            for place in range(12):
                gray = np.full((32, 32, 3), 10 * place + 100 * number, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(gray, "rgb24")))
            container.mux(stream.encode(None))
        (folder / f"{number}.mp4").write_bytes(buffer.getvalue())
    decode = {"name": "decode_video", "field": "file", "frames": 3, "size": [16, 24]}
    arguments: dict[str, Any] = {"format": "files", "options": {"extensions": ["mp4"]}}
    with Loader(
        folder, batch_size=2, order="sequential", transform=[decode], **arguments
    ) as loader:
        video = next(loader)["video"]
    assert video.shape == (2, 3, 16, 24, 3)
    assert video.dtype == torch.uint8
    levels = video.float().mean(dim=(2, 3, 4))
    wanted = torch.tensor([[20.0, 60.0, 100.0], [120.0, 160.0, 200.0]])
    assert (levels - wanted).abs().max() <= 3
