"""``python -m lightrl``: the same as the command ``lightrl``."""

import sys

from lightrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
