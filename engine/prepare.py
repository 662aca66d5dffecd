"""`python -m engine.prepare REFERENCE`: the folder, id and name of a model, as JSON on stdout.

Progress goes to standard error. Exit status 1 when there is no such model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from base.errors import ConfigError
from engine.model_store import prepare


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.prepare", description=__doc__)
    parser.add_argument("reference", help="a folder, a .gguf file, a hub name or smollm2")
    parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/conductor-cluster"))
    arguments = parser.parse_args()

    def say(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    try:
        prepared = prepare(arguments.reference, arguments.cache_dir, say)
    except ConfigError as error:
        say(str(error))
        return 1
    sys.stdout.write(json.dumps(dataclasses.asdict(prepared)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
