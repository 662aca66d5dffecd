"""`python -m conductor.replay`: the command."""

import sys

from conductor.replay.command import main

if __name__ == "__main__":
    sys.exit(main())
