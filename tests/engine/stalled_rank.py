"""A rank that joins, takes part in nothing, and ends with its pipe."""

import threading

from engine.ranks import join_ranks

joined = join_ranks()
threading.Event().wait()
