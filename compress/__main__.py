"""`python -m compress`."""

import sys

from compress.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
