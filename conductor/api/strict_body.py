"""The base of every body that a client sends, and of its parts."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictBody(BaseModel):
    """The body of a call, or a part of one."""

    # Fields we do not know are kept for one look at whether we refuse them.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)
