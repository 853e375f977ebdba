"""Recognize products on a shelf or at a checkout, and learn new ones from five photos, on the device.

    python3 shop.py BUNDLE SOURCE [--shelf ROWSxCOLUMNS] [--port 8000] [--no-page]

SOURCE is a folder of photos, a photo, a video file, camera:0, or - for JPEG images from stdin. Each answer is a line on
stdout. The page at http://127.0.0.1:8000/ shows the picture and the three best answers, and adds products.
Python 3.7, numpy, a TFLite runtime and the package `deploy` are enough: see README.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from typing import Any, List, Optional, Tuple

try:
    import deploy  # noqa: F401 - only to see whether it is installed
except ImportError:
    FOUND = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir)
    if not os.path.isdir(os.path.join(FOUND, "deploy")):
        sys.exit("shop: the package deploy is not installed; to do: PYTHONPATH=runner.pyz python3 shop.py …")
    sys.path.append(FOUND)

from page import Page, served
from pictures_of_shop import opened
from till import Seen, Till, line

from deploy import Recognizer
from deploy.contract import bundle, trust
from deploy.contract.errors import ArgumentError, DeviceError
from deploy.learn.learnt_file import beside
from deploy.runner.model import load_safely
from deploy.runner.runtime import RuntimeOptions

MAX_PARTS = 100


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shop.py", description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", help="a .coralline file with a classifier")
    source = "a folder of photos, a photo, a video file, camera:0, or - for JPEG images from stdin"
    parser.add_argument("source", help=source)
    shelf = "cut each picture into parts, with a product in each"
    parser.add_argument("--shelf", metavar="ROWSxCOLUMNS", default="1x1", help=shelf)
    interval = "time between pictures (default: 1 for photos, otherwise 0)"
    parser.add_argument("--interval", type=float, metavar="SECONDS", help=interval)
    parser.add_argument("--learnt", metavar="FILE", help="the file with learnt products (default: next to the bundle)")
    parser.add_argument(
        "--device", default="", help="cpu, usb, pci, … (default: an Edge TPU if the bundle is compiled)"
    )
    parser.add_argument("--no-page", action="store_true", help="look at each picture once, without a page")
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1 or ::1 (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port of the page; 0: any (default: %(default)s)")
    proxy = "a Host that a proxy in front of the page sends, such as shop.example:443; may be repeated"
    parser.add_argument("--name", action="append", default=[], metavar="HOST", help=proxy)
    return parser


def shelf_of(text: str) -> Tuple[int, int]:
    """Return rows and columns from ROWSxCOLUMNS.

    Raises:
        ArgumentError: the text is something else, or there are too many parts.
    """
    numbers = text.split("x")
    if len(numbers) != 2 or not all(number.isdigit() and len(number) < 4 for number in numbers):
        raise ArgumentError("--shelf %s is not rows and columns" % text[:40], "write --shelf 2x3")
    rows, columns = (int(number) for number in numbers)
    if not 1 <= rows * columns <= MAX_PARTS:
        raise ArgumentError("--shelf %s has %d parts" % (text, rows * columns), "use 1 to %d" % MAX_PARTS)
    return rows, columns


def run(arguments: argparse.Namespace) -> None:
    """Run the shop until its pictures end, or until a signal.

    Raises:
        BundleError, DeviceError, OSError: see `Recognizer`, `opened` and `Page`.
    """
    rows, columns = shelf_of(arguments.shelf)
    content = bundle.read(arguments.bundle, trust.find())
    model = load_safely(content, None, RuntimeOptions(arguments.device))
    recognizer = Recognizer(model, arguments.learnt or beside(arguments.bundle))
    if model.remark:
        print("shop: %s" % model.remark, file=sys.stderr)
    if content.confidence is None:
        print("shop: the bundle has no calibration: the scores are not confidences", file=sys.stderr)
    pictures = opened(arguments.source, content.decoding, not arguments.no_page, arguments.interval)
    till = Till(recognizer, pictures, rows, columns, _print)
    if arguments.no_page:
        till.run()
        if till.problem:
            raise SystemExit(3)
        return
    page = Page(till, arguments.host, arguments.port, tuple(name.lower() for name in arguments.name))
    print("shop: open %s" % page.url, file=sys.stderr, flush=True)
    threading.Thread(target=till.run, daemon=True).start()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        served(page)
    finally:
        till.stop()


def _print(seen: Seen) -> None:
    try:
        print(line(seen), flush=True)
    except BrokenPipeError:  # the program that reads the lines has ended; the page continues
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def main(argv: Optional[List[str]] = None) -> int:
    """Run the command line; return its exit code, as those of runner.pyz."""
    arguments = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    try:
        run(arguments)
    except KeyboardInterrupt:
        return 0
    except (DeviceError, bundle.BundleError) as error:
        print("shop: %s" % error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print("shop: %s" % error, file=sys.stderr)
        return 6
    return 0


if __name__ == "__main__":
    sys.exit(main())
