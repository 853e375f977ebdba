"""The retail application: its answers, its page in a real browser, and hostile requests."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
import small_shop
from browser import browser
from interpreters import executable
from paths import ROOT
from PIL import Image

from compress.surface.cli.main import build_parser
from deploy import Recognizer
from deploy.contract.bundle import array_bytes

SHOP = ROOT / "examples" / "retail" / "shop.py"
OWN = {"X-Shop": "1"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder with a bundle, and with photos of sevens and of eights in two subfolders."""
    (tmp_path / "shop.coralline").write_bytes(small_shop.packed())
    for name, digit in (("photos", 7), ("eights", 8)):
        (tmp_path / name).mkdir()
        for number, photo in enumerate(small_shop.photos(digit, 6)[0]):
            large = np.kron(photo[..., 0], np.ones((16, 16), np.uint8))
            Image.fromarray(large).save(tmp_path / name / f"{number}.png")
    return tmp_path


def environment(place: Path) -> dict[str, str]:
    return devices.environment(CORALLINE_ROOT=place / "nothing")


def lines(place: Path, *options: str, **more: Any) -> list[str]:
    """Run the application without its page; return the lines that it prints."""
    command = [sys.executable, "-W", "error", str(SHOP), "shop.coralline", *options, "--no-page"]
    done = subprocess.run(command, cwd=place, env=environment(place), capture_output=True, check=True, **more)
    return done.stdout.decode().splitlines()


@contextmanager
def running(place: Path, *options: str, python: str = sys.executable) -> Iterator[int]:
    """Run the application; yield its port."""
    arguments = [python, "-W", "error", str(SHOP), "shop.coralline", *options, "--port", "0"]
    process = subprocess.Popen(
        arguments, cwd=place, env=environment(place), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert process.stderr is not None
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if line.startswith("shop: open http://127.0.0.1:"):
                break
        else:
            raise AssertionError("".join(said))
        drain = threading.Thread(target=process.stderr.read, daemon=True)
        drain.start()
        yield int(said[-1].rsplit(":", 1)[1].strip().rstrip("/"))
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        process.stderr.close()


def asked(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any, dict[str, str]]:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        client.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
        answer = client.getresponse()
        content = answer.read()
        is_json = answer.headers["Content-Type"] == "application/json"
        return answer.status, json.loads(content) if is_json else content, dict(answer.headers)
    finally:
        client.close()


def wait_for(port: int, kept: int = 5) -> dict[str, Any]:
    for _ in range(400):
        state: dict[str, Any] = asked(port, "GET", "/state.json")[1]
        if state["kept"] >= kept:
            return state
        threading.Event().wait(0.05)
    raise AssertionError(state)


def test_lines_without_a_page(place: Path) -> None:
    answers = lines(place, "eights", "--interval", "0")
    assert len(answers) == 6
    assert sum(line.split(": ")[1].startswith("eight ") for line in answers) >= 5


def test_a_shelf_is_cut_into_parts(place: Path) -> None:
    eight, zero = (small_shop.photos(digit)[0][0][..., 0] for digit in (8, 0))
    Image.fromarray(np.block([[eight, zero, eight], [zero, eight, zero]])).save(place / "shelf.png")
    (answer,) = lines(place, "shelf.png", "--shelf", "2x3")
    labels = [part.split()[0] for part in answer.partition(": ")[2].split(" | ")]
    assert labels == ["eight", "zero", "eight", "zero", "eight", "zero"]


def test_the_page_in_a_browser(place: Path, tmp_path: Path) -> None:
    """A user reads answers, teaches products from pictures and from files, undoes and exports. No text becomes HTML."""
    name = '<img src=x onerror="document.title=1"> & milk'
    with running(place, "photos", "--interval", "0.2") as port, browser(tmp_path) as page:
        page.open(f"http://127.0.0.1:{port}/")
        page.wait("document.getElementById('picture').naturalWidth === 128")
        page.wait("document.querySelectorAll('#answers tr').length === 3")
        assert page.text("products") == "none"
        assert page.value("document.getElementById('undo').disabled")
        assert page.value("document.getElementById('place').offsetParent === null")
        page.wait("document.getElementById('frames').innerText.includes('last 5')")
        page.type("product", name)
        page.click("frames")
        page.wait("document.getElementById('result').innerText.includes('learnt')")
        page.wait("document.getElementById('products').innerText !== 'none'")
        assert page.text("products") == f"{name} (5 photos)"
        assert page.value("document.querySelector('#products img') === null")
        assert page.value("document.title") == "Shop"
        page.click("undo")
        page.wait("document.getElementById('products').innerText === 'none'")
        page.click("upload")
        assert page.text("result") == "Choose about five photos first."
        page.choose("files", sorted((place / "photos").iterdir())[:5])
        page.type("product", "Seven")
        page.click("upload")
        page.wait("document.getElementById('products').innerText === 'Seven (5 photos)'")
        page.wait("document.querySelector('#answers .best').innerText === 'Seven'")
        page.type("product", "zero")
        page.click("frames")
        page.wait("document.getElementById('result').className === 'wrong'")
        assert "is a class of the bundle already" in page.text("result")
        exported = page.value("fetch('export').then(answer => answer.text()).then(text => text.slice(0, 17))")
        assert exported == "Coralline-learnt1"
        assert [failure for failure in page.failures if "400 (Bad Request)" not in failure] == []
    with Recognizer(str(place / "shop.coralline")) as recognizer:
        assert recognizer.learnt == [("Seven", 5)]


@pytest.mark.parametrize("version", ["3.7", None])
def test_the_buttons_over_http(place: Path, version: str | None) -> None:
    """Arrays do not need Pillow. Without Pillow, the picture is a PNG file."""
    (place / "arrays").mkdir()
    photos, others = small_shop.photos(7, 6)
    for number, photo in enumerate(photos):
        np.save(place / "arrays" / f"{number}.npy", photo)
    python = sys.executable if version is None else executable(version)
    with running(place, "arrays", "--interval", "0.05", python=python) as port:
        state = wait_for(port)
        assert (state["can_learn"], state["products"], state["learnt"]) == (True, 8, [])
        kind = asked(port, "GET", "/picture")[2]["Content-Type"]
        assert kind == ("image/jpeg" if version is None else "image/png")
        learnt = asked(port, "POST", "/learn?name=Seven&part=0", **OWN)[1]["learnt"]
        assert (learnt["name"], learnt["photos"]) == ("Seven", 5)
        assert wait_for(port)["learnt"] == [{"name": "Seven", "photos": 5}]
        files = [array_bytes(photo) for photo in others[:3]]
        sizes = ",".join(str(len(file)) for file in files)
        more = asked(port, "POST", "/learn?name=Seven", b"".join(files), X_Sizes=sizes, **OWN)
        assert more[1]["learnt"]["total"] == 8
        exported = asked(port, "GET", "/export")
        assert exported[2]["Content-Disposition"] == 'attachment; filename="products.learnt"'
        for _ in range(2):
            assert asked(port, "POST", "/undo", **OWN)[0] == 200
        assert asked(port, "POST", "/undo", **OWN)[:2] == (
            400,
            {"error": "there is no change to undo; to do: learn a class first"},
        )
        assert asked(port, "POST", "/import", exported[1], **OWN)[1]["imported"]["photos"] == 8
        assert [event["action"] for event in wait_for(port)["history"]] == [
            *("learn", "learn", "undo", "undo", "import"),
        ]


def test_hostile_requests(place: Path) -> None:
    with running(place, "photos", "--interval", "0.05") as port:
        wait_for(port)
        for headers in ({"Host": "evil.example"}, {"Host": f"127.0.0.1.evil:{port}"}, {"Host": "localhost"}):
            assert asked(port, "GET", "/state.json", **headers)[0] == 403
            assert asked(port, "POST", "/undo", **headers, **OWN)[0] == 403
        for headers in ({}, {"Origin": "http://evil.example", **OWN}, {"Origin": "null", **OWN}, {"X-Shop": "2"}):
            status, answer, _ = asked(port, "POST", "/learn?name=a", **headers)
            assert (status, answer) == (403, {"error": "the request does not come from this page"})
        same_origin = {"Origin": f"http://localhost:{port}", **OWN}
        cases = [
            ("/learn?name=", b"", {}, 400),
            ("/learn?name=" + "x" * 81, b"", {}, 400),
            ("/learn?name=a&part=1", b"", {}, 400),
            ("/learn?name=a&part=-1", b"", {}, 400),
            ("/learn?name=%ff", b"", {}, 400),
            ("/learn?name=" + "x" * 2000, b"", {}, 414),
            ("/learn?name=a", b"not a photo", {"X_Sizes": "11"}, 400),
            ("/learn?name=a", b"not a photo", {"X_Sizes": "12"}, 400),
            ("/learn?name=a", b"not a photo", {}, 400),
            ("/learn?name=a", b"x" * 21, {"X_Sizes": ",".join("1" * 21)}, 400),
            ("/import", b"x" * 1000, {}, 400),
            ("/other", b"", {}, 404),
        ]
        for path, body, headers, expected in cases:
            status, answer, _ = asked(port, "POST", path, body, **headers, **same_origin)
            assert (status, list(answer)) == (expected, ["error"]), path
        for path in ("/../shop.py", "/shop.py", "/%2e%2e/till.py", "//etc/passwd", "/page.js/.."):
            assert asked(port, "GET", path)[0] == 404
        headers_of_page = asked(port, "GET", "/")[2]
        assert "default-src 'none'" in headers_of_page["Content-Security-Policy"]
        assert "unsafe" not in headers_of_page["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in headers_of_page
        raw = [
            b"POST /undo HTTP/1.1\r\nHost: localhost:%d\r\nX-Shop: 1\r\nContent-Length: 99999999999\r\n\r\n" % port,
            b"POST /undo HTTP/1.1\r\nHost: localhost:%d\r\nX-Shop: 1\r\nContent-Length: -1\r\n\r\n" % port,
            b"POST /undo HTTP/1.1\r\nHost: localhost:%d\r\nX-Shop: 1\r\nTransfer-Encoding: chunked\r\n\r\n" % port,
            b"POST /undo HTTP/1.1\r\nHost: localhost:%d\r\nX-Shop: 1\r\nContent-Length: 0\r\nContent-Length: 1\r\n\r\n"
            % port,
            b"GET / HTTP/1.1\r\nHost: a\r\nHost: localhost:%d\r\n\r\n" % port,
            b"\x00\xff" * 100 + b"\r\n\r\n",
        ]
        for request, expected in zip(raw, (413, 400, 411, 411, 403, 400), strict=True):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
                client.sendall(request)
                answer = client.recv(1 << 16)
            assert answer.split()[1] == str(expected).encode() or b"code: 400" in answer, answer
        idle = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(40)]
        for client in idle:
            client.close()
        for _ in range(100):  # until the server has noticed that they are closed
            with suppress(ConnectionError, http.client.HTTPException):
                assert asked(port, "GET", "/state.json")[1]["learnt"] == []
                break
            threading.Event().wait(0.05)
        else:
            raise AssertionError("the page does not answer any more")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("none",), 2, "none does not exist"),
        (("photos", "--host", "0.0.0.0"), 2, "listens on this machine only.*ssh -L"),
        (("photos", "--shelf", "2"), 2, "is not rows and columns"),
        (("photos", "--shelf", "99x99"), 2, "has 9801 parts"),
        (("camera:0",), 2, "OpenCV is not installed.*opencv-python-headless"),
        (("photos", "--learnt", "photos/0.png"), 6, "not a file with learnt classes"),
        (("damaged", "--no-page"), 3, "no photo can be used"),
    ],
)
def test_mistakes_are_named(place: Path, options: tuple[str, ...], code: int, message: str) -> None:
    (place / "damaged").mkdir()
    (place / "damaged" / "a.png").write_bytes(b"not a photo")
    blocked = (
        "import sys, runpy; sys.modules['cv2'] = None; sys.argv = sys.argv[1:]; sys.path.insert(0, sys.argv[0][:-7]);"
    )
    blocked += "runpy.run_path(sys.argv[0], run_name='__main__')"
    arguments = [sys.executable, "-c", blocked, str(SHOP), "shop.coralline", *options, "--port", "0"]
    done = subprocess.run(
        arguments, cwd=place, env=environment(place), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    assert re.search(message, done.stderr), done.stderr


def test_frames_from_stdin(place: Path) -> None:
    frames = b""
    for number in range(3):
        path = place / f"{number}.jpg"
        Image.open(place / "eights" / f"{number}.png").save(path, quality=95)
        frames += path.read_bytes()
    answers = lines(place, "-", input=frames)
    assert [line.split(":")[0] for line in answers] == ["frame 1", "frame 2", "frame 3"]


def test_the_pipeline_of_the_manual(tmp_path: Path) -> None:
    """The YAML file in README.md is valid, and every option of its table exists."""
    from compress.pipeline.schema import load

    text = (SHOP.parent / "README.md").read_text()
    (tmp_path / "shop.keras").touch()
    (tmp_path / "photos").mkdir()
    (tmp_path / "pipeline.yaml").write_text(text.partition("```yaml\n")[2].partition("```")[0])
    stages = [entry.stage.name for entry in load(tmp_path / "pipeline.yaml").steps[1:]]
    assert stages == ["quantize", "expose_embedding", "compile", "package"]
    arguments = [sys.executable, str(SHOP), "--help"]
    usage = subprocess.run(arguments, env=environment(tmp_path), capture_output=True, text=True, check=True)
    named = set(re.findall(r"`(--[a-z-]+)", text))
    assert named >= {"--shelf", "--no-page", "--learnt"}
    assert [option for option in named if option not in usage.stdout] == []


def made_shop(place: Path, *variables: str) -> subprocess.CompletedProcess[str]:
    """Run `make shop` with a Python that writes its arguments to calls.txt, and with the environment set up."""
    (place / "bin").mkdir(exist_ok=True)
    program = place / "bin" / "python"
    program.write_text('#!/bin/sh\nfor each; do printf "%s\\t" "$each"; done >> calls.txt; echo >> calls.txt\n')
    program.chmod(0o755)
    command = ["make", "--file", str(ROOT / "Makefile"), f"BIN={place / 'bin'}", "READY=", "shop", *variables]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)


def test_make_shop_writes_the_pipeline_runs_it_and_starts_the_page(tmp_path: Path) -> None:
    done = made_shop(tmp_path, "PHOTOS=my photos", "MODEL=a model.tflite", "LABEL=product")
    assert done.returncode == 0, done.stderr
    init, run, shop = ([*line.split("\t")[:-1]] for line in (tmp_path / "calls.txt").read_text().splitlines())
    assert init[:3] == ["-m", "compress", "init"]
    assert run == ["-m", "compress", "shop.yaml"]
    assert shop == ["examples/retail/shop.py", "runs/shop/shop.coralline", "my photos"]
    options = build_parser()[0].parse_args(init[2:])
    assert (options.data, options.model, options.label) == (Path("my photos"), Path("a model.tflite"), "product")
    assert (options.learn, options.out) == (True, Path("shop.yaml"))


def test_make_shop_keeps_a_pipeline_that_exists(tmp_path: Path) -> None:
    (tmp_path / "shop.yaml").touch()
    done = made_shop(tmp_path, "PHOTOS=photos")
    assert "shop.yaml exists, and is used as it is" in done.stdout
    assert "init" not in (tmp_path / "calls.txt").read_text()


def test_make_shop_without_photos_says_what_it_needs(tmp_path: Path) -> None:
    done = made_shop(tmp_path)
    assert done.returncode == 2
    assert "make shop PHOTOS=FOLDER" in done.stderr
    assert not (tmp_path / "calls.txt").exists()
