"""What all tests share."""

import sys
from pathlib import Path

# Helpers beside the tests are imported as tests.*, from wherever pytest is started.
sys.path.insert(0, str(Path(__file__).parent.parent))
