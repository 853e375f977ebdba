"""The options of `deploy`, `rollback` and `results`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

Parser = Callable[..., argparse.ArgumentParser]


def deploy(new: Parser) -> argparse.ArgumentParser:
    """`python -m compress deploy`."""
    parser = new(prog="python -m compress deploy", description="Brings a bundle to devices.")
    parser.add_argument("bundle", type=Path, help="a .coralline file")
    _fleet(parser)
    parser.add_argument("--verify", action="store_true", help="once more after the switch; before it is always done")
    parser.add_argument("--bench", action="store_true", help="measure there; results go to devices/ beside the bundle")
    parser.add_argument("--keep", type=int, default=3, metavar="N", help="how many versions stay on a device (3)")
    return parser


def rollback(new: Parser) -> argparse.ArgumentParser:
    """`python -m compress rollback`."""
    parser = new(prog="python -m compress rollback", description="Switches to the version that ran before.")
    _fleet(parser)
    return parser


def results(new: Parser) -> argparse.ArgumentParser:
    """`python -m compress results`."""
    parser = new(prog="python -m compress results", description="Takes in what a device has measured.")
    parser.add_argument("file", type=Path, help="what `runner.pyz bench --out FILE` wrote there")
    parser.add_argument("--run", type=Path, metavar="DIR", help="the run that made the bundle (runs/NAME)")
    parser.add_argument("--name", metavar="DEVICE", help="the name of the device (the name of the file)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def _fleet(parser: argparse.ArgumentParser) -> None:
    where = "ssh://[user@]host[:port]/path, file:///path or a folder; repeatable"
    parser.add_argument("--to", action="append", default=[], metavar="ADDRESS", help=where)
    parser.add_argument("--hosts", type=Path, metavar="FILE", help="addresses, one on a line; # begins a comment")
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="devices at a time (4)")
    python = "the Python there, by name or path, such as '~/venv/bin/python3' (python3)"
    parser.add_argument("--python", default="python3", metavar="PROGRAM", help=python)
    parser.add_argument("--device", default="", help="what the runner there shall use: cpu, usb, pci, usb:0, ...")
    parser.add_argument("--identity", type=Path, metavar="FILE", help="the private key to log in with")
    parser.add_argument("--known-hosts", type=Path, metavar="FILE", help="host keys, instead of your own list")
    log = "who deployed what where (~/.local/state/coralline/deployments.jsonl)"
    parser.add_argument("--log", type=Path, metavar="FILE", help=log)
    parser.add_argument("--json", action="store_true", help="as JSON")


PARSERS: dict[str, Callable[[Parser], argparse.ArgumentParser]] = {
    "deploy": deploy,
    "rollback": rollback,
    "results": results,
}
