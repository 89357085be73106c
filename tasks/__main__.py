"""`python -m tasks`: see `tasks.cli`."""

import sys

from tasks.cli import main

if __name__ == "__main__":
    sys.exit(main())
