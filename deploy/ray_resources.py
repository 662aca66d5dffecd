"""What the Ray that this process is connected to has left."""

from __future__ import annotations

import ray


def free_resources() -> dict[str, float]:
    """Return the amounts that no process has taken, by Ray's names of resources."""
    return {str(name): float(amount) for name, amount in ray.available_resources().items()}
