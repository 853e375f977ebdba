"""The frames of a video from stdin."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import detector_files
import devices
import numpy as np
import pytest
from detector_files import photo
from pictures import encoded
from PIL import Image

from deploy import __main__ as command
from deploy.contract.errors import EXIT_INTERRUPTED, EXIT_PIPE, ArgumentError, ImageError
from deploy.runner import frames

SIDE = 64
STEPS = [{"resize": {"size": [SIDE, SIDE]}}, {"scale": {"from": [0, 255], "to": [0, 1]}}]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector of three classes."""
    return detector_files.small_bundle(tmp_path_factory.mktemp("bundle"), SIDE, STEPS)


def jpegs(count: int) -> list[bytes]:
    jpeg_files = []
    for number in range(count):
        preview = encoded(Image.fromarray(photo(9)), "JPEG")  # metadata may contain a preview image
        options = {"progressive": number % 2, "exif": b"Exif\0\0" + preview[:9000]}
        jpeg_files.append(encoded(Image.fromarray(photo(number)), "JPEG", **options))
    return jpeg_files


def slow(content: bytes, most: int = 77) -> io.BufferedReader:
    """Return a stream that reads a few bytes at a time."""
    return io.BufferedReader(io.BytesIO(content), most)


def test_frames_are_cut_out_of_a_stream() -> None:
    expected = jpegs(3)
    assert list(frames.jpegs(slow(b"".join(expected)))) == expected
    assert list(frames.jpegs(slow(b""))) == []
    images = np.random.default_rng(0).integers(0, 256, (2, 5, 7, 3)).astype(np.uint8)
    np.testing.assert_array_equal(list(frames.raw(slow(images.tobytes()), 7, 5)), images)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"GIF89a....", "no JPEG image"),
        (jpegs(1)[0][:-40], "ends in the middle"),
        (jpegs(1)[0] + b"x", "ends in the middle"),
        (jpegs(1)[0] + b"\r\n" + jpegs(1)[0], "no JPEG image"),
        (b"\xff\xd8\xff\xe0\x00\x04ab12", "damaged"),
    ],
)
def test_streams_of_something_else(content: bytes, part: str) -> None:
    with pytest.raises(ImageError, match=part):
        list(frames.jpegs(slow(content)))


def test_a_frame_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_BYTES", 200_000)
    endless = slow(b"\xff\xd8\xff\xda\x00\x04ab" + bytes(1_000_000))
    with pytest.raises(ImageError, match="the JPEG image has more than 200000 bytes"):
        list(frames.jpegs(endless))


@pytest.mark.parametrize("size", ["640", "0x4", "640x480x3", "-1x5", ""])
def test_sizes_of_frames(size: str) -> None:
    with pytest.raises(ArgumentError, match="not a size"):
        frames.size_of(size)


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=slow(content, 8192)))


def test_a_video_from_stdin(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, b"".join(jpegs(3)))
    assert command.main(["run", str(path), "-", "--json", "--draw", str(tmp_path / "drawn")]) == 0
    *rows, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert [row["image"] for row in rows] == ["frame-000001", "frame-000002", "frame-000003"]
    assert last["frames"] == 3
    drawn = sorted(file.name for file in (tmp_path / "drawn").iterdir())
    assert drawn == [f"frame-00000{number}.jpg" for number in (1, 2, 3)]
    feed(monkeypatch, photo(0).tobytes())
    assert command.main(["run", str(path), "-", "--frame-size", "160x120"]) == 0
    first, count = capsys.readouterr().out.splitlines()
    assert first.startswith("frame-000001: ")
    assert count == "1 frame"
    assert command.main(["run", str(path), "-", "x.png"]) == ArgumentError.exit_code


def test_frames_on_tiles(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, photo(0).tobytes() + photo(1).tobytes())
    options = ["--top", "100", "--json", "--frame-size", "160x120"]
    assert command.main(["run", str(path), "-", "--tiles", "2x3", *options]) == 0
    tiled = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    feed(monkeypatch, photo(0).tobytes() + photo(1).tobytes())
    assert command.main(["run", str(path), "-", *options]) == 0
    plain = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert tiled[-1]["frames"] == plain[-1]["frames"] == 2
    for one, other in zip(tiled[:-1], plain[:-1], strict=True):
        assert one["image"] == other["image"]
        assert one["top"] != other["top"]


@pytest.mark.parametrize(
    ("content", "options", "part"),
    [
        (jpegs(1)[0] + jpegs(1)[0][:2000], [], "frame 2 of stdin: the stream ends in the middle of a JPEG image"),
        (jpegs(1)[0] + b"\xff\xd8\xff\xd9", [], "frame 2 of stdin: the image cannot be decoded"),
        (photo(0).tobytes() + b"x", ["--frame-size", "160x120"], "frame 2 of stdin: the stream ends after 1 of"),
        (b"", [], "stdin has no frames"),
    ],
)  # fmt: skip
def test_a_damaged_frame_is_named(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    content: bytes, options: list[str], part: str,
) -> None:  # fmt: skip
    feed(monkeypatch, content)
    assert command.main(["run", str(path), "-", *options]) == ImageError.exit_code
    shown = capsys.readouterr()
    assert part in shown.err
    assert shown.out.startswith("frame-000001: ") == bool(content)  # the answers to earlier frames are there


def test_stdin_is_closed(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert command.main(["run", str(path), "-"]) == ArgumentError.exit_code
    assert "stdin is closed" in capsys.readouterr().err


def test_bytes_between_segments_and_large_frames() -> None:
    """Fill bytes before a marker are allowed. A large frame in small pieces must not take quadratic time."""
    (image,) = jpegs(1)
    assert list(frames.jpegs(slow(image[:2] + b"\xff\xff" + image[2:]))) == [image]
    content = bytes(3840 * 2160 * 3)
    start = time.process_time()
    assert len(list(frames.raw(slow(content * 2, 4096), 3840, 2160))) == 2
    assert time.process_time() - start < 5


@contextlib.contextmanager
def running(path: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """The runner, with an endless stream of frames as its stdin."""
    source = [sys.executable, "-c", "import sys\nwhile True: sys.stdout.buffer.write(bytes(160 * 120 * 3))"]
    argv = [sys.executable, "-W", "error", "-m", "deploy", "run", str(path), "-", "--frame-size", "160x120", *options]
    with subprocess.Popen(source, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as writer:
        with subprocess.Popen(
            argv, stdin=writer.stdout, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=devices.environment()
        ) as runner:
            assert writer.stdout is not None
            writer.stdout.close()
            yield runner
            runner.kill()
        writer.kill()


def test_a_reader_that_has_enough(path: Path) -> None:
    """The reader stops after the first line, as in `runner.pyz run … - | head -1`."""
    with running(path) as runner:
        assert runner.stdout is not None
        assert runner.stdout.readline().startswith(b"frame-000001: ")
        runner.stdout.close()
        assert runner.wait(60) == EXIT_PIPE
        assert runner.stderr is not None
        assert b"Broken" not in runner.stderr.read()


def test_control_c_in_an_endless_stream_of_constant_memory(path: Path) -> None:
    with running(path, "--json") as runner:
        assert runner.stdout is not None
        sizes = []
        for number in range(1, 1201):
            assert json.loads(runner.stdout.readline())["image"] == f"frame-{number:06d}"
            if number % 600 == 0:
                pages = Path(f"/proc/{runner.pid}/statm").read_text().split()[1]
                sizes.append(int(pages) * resource.getpagesize())
        assert sizes[1] - sizes[0] < 2_000_000  # 600 frames have 35 MB, and 600 answers of 1 kB
        runner.send_signal(signal.SIGINT)
        rest = runner.communicate(timeout=60)
        assert runner.returncode == EXIT_INTERRUPTED
        assert b"interrupted" in rest[1]
        assert b"Traceback" not in rest[1]
