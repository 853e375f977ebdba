"""`python -m compress`."""

import sys

from compress.surface.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
