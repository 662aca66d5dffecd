"""`python -m conductor`, but a node drawn at random changes its role twice a second, whatever the load is."""

from __future__ import annotations

import random
import sys
from unittest.mock import patch

from base.request import Role
from conductor.__main__ import main
from conductor.placing.cluster_view import ClusterView
from conductor.placing.load_order import bits_of
from conductor.placing.roles import OTHER, RoleChange, RoleController

STEP_S = 0.5


def drawn(
    controller: RoleController, view: ClusterView, now_s: float, waiting_s: float = 0.0
) -> RoleChange | None:
    """Return a change of any node that is not the last of its role."""
    masks = {Role.PREFILL: view.prefill_mask, Role.DECODE: view.decode_mask}
    changes = [
        RoleChange(view.members[slot].info.node_id, OTHER[role])
        for role, mask in masks.items()
        if mask.bit_count() > 1
        for slot in bits_of(mask)
    ]
    return random.choice(changes) if changes else None


if __name__ == "__main__":
    period = patch("conductor.serving.role_changes.STEP_S", STEP_S)
    with period, patch.object(RoleController, "step", drawn):
        sys.exit(main())
