"""A node at a third of the pace of bench/paced_node.py: `python -m bench.slowed_node --config FILE`."""

import sys

from bench.paced_node import TIMES, run_at

SLOWER = 3.0

if __name__ == "__main__":
    sys.exit(run_at(SLOWER * TIMES))
