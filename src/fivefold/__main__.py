"""`python -m fivefold` is the `fivefold` command."""

import sys

from fivefold.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
