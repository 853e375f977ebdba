"""Commands for signatures: keygen, sign."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from compress.cli.output import write
from compress.cli.parser import add_command

if TYPE_CHECKING:
    from compress.cli.parser import Subparsers


def add_parsers(subparsers: Subparsers) -> None:
    """Add the commands."""
    parser = add_command(subparsers, "keygen", "Create a key pair for signing bundles", keygen)
    names = "writes NAME.key (private) and NAME.pem (public)"
    parser.add_argument("name", type=Path, metavar="NAME", help=names)
    parser = add_command(subparsers, "sign", "Sign a bundle", sign)
    parser.add_argument("bundle", type=Path, help="a .coralline file")
    parser.add_argument("--key", type=Path, required=True, metavar="FILE", help="the private key from `keygen`")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file for the signed bundle (default: the same file)")


def keygen(options: argparse.Namespace) -> int:
    """`python -m compress keygen`."""
    from compress.exporters import signing

    private, public = signing.generate(options.name)
    write(f"{private}  signs bundles; keep it secret")
    write(f"{public}  goes to /etc/coralline/keys on the devices")
    return 0


def sign(options: argparse.Namespace) -> int:
    """`python -m compress sign`."""
    from compress.exporters import signing

    out = options.out or options.bundle
    write(f"{out}: signed with {signing.sign(options.bundle, options.key, out)}")
    return 0
