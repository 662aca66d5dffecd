"""A rank without a model, some library of which prints before it answers."""

import json
import os
import sys

from engine.ranks import Pipe, PipeFrame

print("some library says hello", flush=True)
call = json.loads(sys.stdin.buffer.readline())
Pipe(sys.stdin.buffer, os.fdopen(call["answers"], "wb")).send(PipeFrame.MESSAGE, b"joins")
sys.stdin.buffer.read()
