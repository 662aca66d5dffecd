"""A rank that joins, for which it has to wait for rank 0."""

from engine.ranks import join_ranks

join_ranks()
