"""`python -m engine.convert GGUF FOLDER`: a GGUF file to a folder of safetensors.

A process of its own, because reading GGUF takes a gigabyte and half a minute that
whoever asks for a model should not hold. Exit status 1 and one line on standard error
when the file cannot be read.
"""

from __future__ import annotations

import sys
from pathlib import Path

from base.errors import ConfigError
from engine.weights import convert_gguf


def main(gguf: str, folder: str) -> int:
    try:
        convert_gguf(Path(gguf), Path(folder))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
