"""Hit rate over capacity for each eviction policy, on a trace in Mooncake's format.

    python -m bench.hit_rate [trace.jsonl] [--blocks 1000 10000] [--json out.json]

One cache for the whole cluster, blocks as the trace names them (512 tokens). A request's
lookup stops at its first miss; then all its blocks are used in prefix order. Tokens of a
partial last block count as they are. The paper's own curve stands beside ours: its store
had blocks of 256 tokens, so its partial blocks count where ours do not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from base.errors import CapacityError
from bench.about_run import about_run, write_result
from conductor.replay.trace_formats import read_trace
from kvstore.eviction import BY_NAME, Eviction

ROOT = Path(__file__).parent.parent
OPEN_TRACE = ROOT.parent / "shared" / "traces" / "conversation_trace.jsonl"
BLOCK_TOKENS = 512
CAPACITIES = (1_000, 2_000, 5_859, 10_000, 20_000, 30_000, 50_000, 70_000, 100_000, 130_000)

# Qin et al., FAST'25, figure 9, conversation trace, read off the vector figure (about
# +-1 %): capacity in tokens -> token hit rate under LRU.
PAPER_LRU = {1_000_000: 0.087, 3_000_000: 0.17, 5_000_000: 0.247, 15_000_000: 0.34, 50_000_000: 0.398}


@dataclass(frozen=True, slots=True)
class HitRate:
    """One policy at one capacity."""

    policy: str
    capacity_blocks: int
    blocks: float
    tokens: float
    us_per_block: float
    """Wall time of the whole loop, evictions included."""


Prompt = tuple[int, Sequence[int]]
"""(tokens, block names)."""


def prompts_of(path: Path) -> list[Prompt]:
    """Return the prompts of a trace, in order."""
    return [(row.num_tokens, row.chain) for row in read_trace(path).requests]


def hit_rate(prompts: Iterable[Prompt], policy: str, capacity: int) -> HitRate:
    """Run all prompts through one cache of `capacity` blocks."""
    cache: Eviction[int] = BY_NAME[policy]()
    asked_blocks = asked_tokens = hit_blocks = hit_tokens = 0
    began_at_s = time.perf_counter()
    for num_tokens, chain in prompts:
        matched = 0
        while matched < len(chain) and chain[matched] in cache:
            matched += 1
        asked_blocks += len(chain)
        asked_tokens += num_tokens
        hit_blocks += matched
        hit_tokens += min(matched * BLOCK_TOKENS, num_tokens)
        cache.touch(chain[:matched])
        insert_rest(cache, chain, matched, capacity)
    wall_s = time.perf_counter() - began_at_s
    return HitRate(
        policy,
        capacity,
        hit_blocks / asked_blocks,
        hit_tokens / asked_tokens,
        wall_s / asked_blocks * 1e6,
    )


def insert_rest(cache: Eviction[int], chain: Sequence[int], matched: int, capacity: int) -> None:
    """Insert what was not matched, as far as it fits without evicting its own prefix."""
    for at in range(matched, len(chain)):
        parent = chain[at - 1] if at else None
        if len(cache) >= capacity:
            if parent is not None:
                cache.hold(parent)
            try:
                cache.victim()
            except CapacityError:
                return
            finally:
                if parent is not None:
                    cache.release(parent)
        cache.insert(chain[at], parent)


def curves(prompts: Sequence[Prompt], capacities: Iterable[int]) -> list[HitRate]:
    """Return every policy at every capacity, and one row without a bound."""
    rows = [hit_rate(prompts, policy, capacity) for capacity in capacities for policy in BY_NAME]
    unlimited = sum(len(chain) for _, chain in prompts)
    return [*rows, hit_rate(prompts, "lru", unlimited)]


def table(rows: Sequence[HitRate]) -> str:
    """Return block and token hit rates side by side, one line for each capacity."""
    names = list(BY_NAME)
    lines = ["capacity  " + " ".join(f"{name:>20}" for name in names) + "   paper's LRU, tokens"]
    for capacity in dict.fromkeys(row.capacity_blocks for row in rows[:-1]):
        of = {row.policy: row for row in rows if row.capacity_blocks == capacity}
        near = [rate for tokens, rate in PAPER_LRU.items() if 0.9 < capacity * BLOCK_TOKENS / tokens < 1.1]
        cells = " ".join(f"{of[name].blocks:10.4f} / {of[name].tokens:.4f}" for name in names)
        lines.append(f"{capacity:8}  {cells}   {near[0] if near else '-'}")
    last = rows[-1]
    lines.append(f"unlimited {last.blocks:10.4f} / {last.tokens:.4f}   paper 0.401")
    return "\n".join(lines)


def main() -> None:
    """Print the table; with --json also keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, default=OPEN_TRACE)
    parser.add_argument("--blocks", nargs="+", type=int, default=list(CAPACITIES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = curves(prompts_of(options.trace), options.blocks)
    print("hit rate, blocks / tokens")
    print(table(rows))
    result = {
        "run": about_run(),
        "trace": options.trace.name,
        "paper_lru_tokens_by_capacity_tokens": PAPER_LRU,
        "rows": [asdict(row) for row in rows],
    }
    write_result(options.json, result)


if __name__ == "__main__":
    main()
