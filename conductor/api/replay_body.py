"""The body of POST /v1/replay: what to replay, on which nodes, within which bounds."""

from __future__ import annotations

from math import inf
from typing import Annotated

from pydantic import Field

from base.config import SloConfig
from base.request import Slo
from conductor.api.strict_body import StrictBody

Nodes = Annotated[
    str, Field(pattern=r"^([0-9]{1,4}[Pp][0-9]{1,4}[Dd])?([0-9]{1,4}[Cc])?$", min_length=2, max_length=16)
]


class ReplayBody(StrictBody):
    """A replay to be run beside the conductor."""

    trace: str = ""
    """Rows of a trace file; empty: the traffic of the last hour."""
    nodes: list[Nodes] = Field(min_length=1, max_length=5)
    """Clusters, each as 1P1D or 4C."""
    ttft_s: float | None = Field(default=None, gt=0)
    """The bound; null: the server's own."""
    tbt_s: float | None = Field(default=None, gt=0)

    def slo(self, own: SloConfig) -> Slo:
        """Return the bounds; `own` are the server's."""
        return Slo(self.ttft_s or own.ttft_s or inf, self.tbt_s or own.tbt_s or inf)

    def arguments(self) -> list[str]:
        """Return the arguments of `conductor replay` that say the bounds."""
        given = {"--slo-ttft": self.ttft_s, "--slo-tbt": self.tbt_s}
        return [word for name, bound in given.items() if bound for word in (name, str(bound))]
