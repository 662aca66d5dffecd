"""What only the garbage collector would free of what a test's body did."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[Callable[[type | tuple[type, ...]], list[object]]]:
    """Give the body what returns the objects of a kind that are in cycles by then; none was collected."""
    gc.collect()
    gc.disable()

    def left(kind: type | tuple[type, ...]) -> list[object]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            return [item for item in gc.garbage if isinstance(item, kind)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()

    try:
        yield left
    finally:
        gc.enable()
