"""`python -m bench.papers`: the command."""

import sys

from bench.papers.command import main

if __name__ == "__main__":
    sys.exit(main())
