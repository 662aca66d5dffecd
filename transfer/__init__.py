"""The Messenger: moves byte ranges between registered segments of two processes."""
