"""A rank without a model, some library of which prints to where it should answer."""

import sys

sys.stdin.buffer.readline()
print("some library says hello", flush=True)
sys.stdin.buffer.read()
