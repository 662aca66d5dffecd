"""A conductor that knows other placement rules too: `python -m bench.rules_conductor --config FILE`.

`python -m conductor`, whose `scheduler.policy` may also be

* the name of a peer's rule (bench/papers/peers.py);
* `alike`: our rule, with one pace for all nodes: what is measured of one is learned of each;
* `uncharged`: our rule, to which a copy costs nothing but its seconds.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import conductor.__main__
from bench.papers.peers import RULES, peer_policy
from conductor.placing import cluster_view
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import Corrections, NodeCorrections
from conductor.placing.prefill_policies import POLICIES, PrefillChoice, least_cost

EVERY_NODE = "every node"


class OnePace(Corrections):
    """What was learned of all nodes together."""

    def of(self, node_id: str) -> NodeCorrections:
        return super().of(EVERY_NODE)

    def observe(self, node_id: str, term: str, predicted_s: float, measured_s: float, count: int = 1) -> None:
        super().observe(EVERY_NODE, term, predicted_s, measured_s, count)

    def ratio(self, node_id: str, term: str) -> float:
        return super().ratio(EVERY_NODE, term)


def uncharged(request: Any, groups: Any, view: ClusterView, *rest: Any) -> PrefillChoice:
    """Return our rule's choice, the price of a block being forgotten."""
    view.copy_price.block_s = 0.0
    return least_cost(request, groups, view, *rest)


def main() -> int:
    POLICIES.update({name: peer_policy(name) for name in RULES}, alike=least_cost, uncharged=uncharged)
    config = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    with ExitStack() as patched:
        if config["scheduler"]["policy"] == "alike":
            patched.enter_context(patch.object(cluster_view, "Corrections", OnePace))
        return conductor.__main__.main()


if __name__ == "__main__":
    sys.exit(main())
