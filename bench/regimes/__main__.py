"""`python -m bench.regimes`: the command."""

import sys

from bench.regimes.command import main

if __name__ == "__main__":
    sys.exit(main())
