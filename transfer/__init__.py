"""The Messenger: bytes between the memories of two processes, as fast as the wire.

It knows segments, offsets and grants, and nothing of tokens. `agent.py` is the entry.
"""
