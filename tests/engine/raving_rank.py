"""A rank without a model, which answers with what is no frame."""

import json
import os
import sys

os.write(json.loads(sys.stdin.buffer.readline())["answers"], b"some library says hello")
sys.stdin.buffer.read()
