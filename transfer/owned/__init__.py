"""What this process owns and lends: segments of memory, grants on them, the board that shows both."""
