"""The runner's command line: `python3 runner.pyz verify BUNDLE [--key FILE]`."""

from __future__ import annotations

import argparse
import sys
from typing import Optional, Sequence

from deploy import bundle, signature


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs one command and gives its exit code: 0, 2 for a file that cannot be read, 8 for a bundle that is refused."""
    parser = argparse.ArgumentParser(prog="runner.pyz")
    commands = parser.add_subparsers(dest="command")
    commands.required = True
    verify = commands.add_parser("verify", help="whether a bundle is what was packed, and who signed it")
    verify.add_argument("bundle")
    verify.add_argument("--key", action="append", default=[], metavar="FILE", help="the .pem it must be signed with")
    options = parser.parse_args(arguments)
    try:
        opened = bundle.read(options.bundle, signature.trusted(options.key))
    except (bundle.BundleError, signature.KeyFileError) as error:
        print("runner: %s" % error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print("runner: %s: %s" % (options.bundle, error.strerror), file=sys.stderr)
        return 2
    print("signed with %s" % signature.key_name(opened.signer) if opened.signer else "whole, but not signed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
