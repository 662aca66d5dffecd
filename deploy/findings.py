"""What `conductor doctor` has to say of one thing that it looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: str
    """ok, warning or wrong."""
    what: str
    mend: str = ""
