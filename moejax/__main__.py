"""``python -m moejax``: the same as the command ``moejax``."""

import sys

from moejax.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
