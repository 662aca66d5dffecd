"""`python -m bench.agents_live`: coding agents of a trace, so many sessions at a time, sent over HTTP.

Each agent asks, waits for its answer, runs its tools and asks again with all that was said. They name no
bounds, begin with the same instructions, and together have more context than the nodes have memory for. Of
the trace those sessions are sent whose first prompt is not too long, as far as their contexts grow to the
longest that is asked for; pauses are a tenth.

    python -m bench.agents_live --kv-cache-gib 40 --trace agentic_code_seed42.jsonl --out agents.json
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import uvloop

from base.config import ClusterConfig, StoreConfig
from bench.about_run import write_result
from bench.chats_live import summary
from bench.load import run_load, warm_up
from bench.local_cluster import local_cluster
from bench.shapes import about, cluster_config, limits_of, options_parser, parse_shape, write_model
from bench.sse_client import Server
from bench.workload import LoadRequest, num_turns, trace_load
from conductor.replay.trace_formats import read_trace

SESSIONS = 60
TURNS = 20
FEWEST_TURNS = 3
SHORTER_PAUSES = 10.0


def sessions(path: Path, first_tokens: int, longest: int, block_tokens: int | None) -> Iterator[LoadRequest]:
    """Yield the first `SESSIONS` of a trace that begin with `first_tokens` at most, cut at `longest`."""
    whole = trace_load(read_trace(path, None, False, None), 1.0, None, block_tokens)
    cut = (_cut(first, longest, TURNS) for first in whole if len(first.token_ids) <= first_tokens)
    return islice(
        (first for first in cut if first is not None and num_turns(first) >= FEWEST_TURNS), SESSIONS
    )


def _cut(turn: LoadRequest, longest: int, turns: int) -> LoadRequest | None:
    """Return a session up to its last turn that is not too long, without what forks from it."""
    if not turns or len(turn.token_ids) + turn.output_tokens > longest:
        return None
    later = turn.next_turn and _cut(turn.next_turn, longest, turns - 1)
    return replace(turn, at_s=turn.at_s / SHORTER_PAUSES, next_turn=later, forks=())


def most_decoding(decisions: Path) -> int:
    """Return the most sequences that decoded on a node together, of those that decisions saw."""
    seen = [0]
    for line in decisions.read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "decision":
            seen += [node["decode_sequences"] for node in row["seen"]["nodes"]]
    return max(seen)


def main() -> None:
    parser = options_parser(__doc__, max_model_len=131_072)
    parser.add_argument("--shape", type=parse_shape, default="1c")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--agents", type=int, default=16, help="sessions at a time")
    parser.add_argument("--cut-s", type=float, default=100.0, help="after which nothing is waited for")
    parser.add_argument("--first-tokens", type=int, default=50_000, help="of a first prompt, at most")
    parser.add_argument("--longest", type=int, default=120_000, help="tokens that a context grows to")
    parser.add_argument("--block-tokens", type=int, help="for each hash id of the trace: scales lengths too")
    parser.add_argument("--dram-gib", type=float, default=0.0, help="of each node's store; 0: none")
    options = parser.parse_args()
    load = list(sessions(options.trace, options.first_tokens, options.longest, options.block_tokens))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        config = cluster_config(options.model, options.shape, replace(limits_of(options), follows_load=True))
        row = _measured(_with_log(config, options.dram_gib, folder), load, options, folder)
    print(json.dumps(row, indent=1), flush=True)
    asked = {key: getattr(options, key) for key in ("agents", "cut_s", "kv_cache_gib", "dram_gib")}
    write_result(options.out, {"shape": options.shape.name, **asked, **about(options.commit), **row})


def _with_log(config: ClusterConfig, dram_gib: float, folder: Path) -> ClusterConfig:
    scheduler = replace(config.scheduler, decision_log=str(folder / "decisions.jsonl"))
    return replace(config, scheduler=scheduler, store=StoreConfig(dram_gib=dram_gib))


def _measured(config: ClusterConfig, load: list[LoadRequest], options: Any, folder: Path) -> dict[str, Any]:
    async def driven(url: str) -> dict[str, Any]:
        server = Server(url, options.model)
        longest = max(len(first.token_ids) for first in load)
        await warm_up(server, 2, min(4_096, longest))
        await warm_up(server, 2, min(200, longest))
        run = await run_load(server, load, None, lambda answered: None, options.agents, options.cut_s)
        return summary(run.outcomes)

    model = write_model(options.model, folder / "model", options.max_model_len)
    with local_cluster(config, model, folder) as cluster:
        cluster.wait_nodes(options.shape.num_nodes)
        row = uvloop.run(driven(cluster.url))
    return {**row, "most_decoding": most_decoding(folder / "decisions.jsonl")}


if __name__ == "__main__":
    main()
