"""Memory that this process owns and lends: segments, grants on them, the board that shows both."""
