"""`python -m conductor`, but for SIGUSR1, which blocks its event loop for ever and no other thread."""

from __future__ import annotations

import signal
import sys
import threading

from conductor.__main__ import main

if __name__ == "__main__":
    # A handler runs in the main thread, between two steps of the event loop.
    signal.signal(signal.SIGUSR1, lambda *_: threading.Event().wait())
    sys.exit(main())
