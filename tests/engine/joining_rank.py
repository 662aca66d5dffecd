"""A rank that joins, for which it has to wait for rank 0; its argument is the time between two beats."""

import sys

import engine.ranks

if sys.argv[1:]:
    engine.ranks.BEAT_S = float(sys.argv[1])
engine.ranks.join_ranks()
