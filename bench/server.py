"""`python -m bench.server`: the table of `bench.engine` through the whole server, beside the engine alone.

One node of both roles behind a conductor, as processes of their own; every prompt and token goes over
HTTP and streams. Each row is done once before it is timed, as in `bench.engine`, whose report of the
same machine gives the other column. A decode step of sequences that have 1,024 tokens is here one of
prompts that were asked before: their blocks are found, and what is timed begins with first tokens.

    python -m bench.engine --out engine.json && python -m bench.server --engine engine.json --out server.json
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from dataclasses import asdict
from pathlib import Path

import uvloop

from bench.about_run import write_result
from bench.engine import Outcome as Row
from bench.engine import run_row
from bench.engine_rows import rows_of, work_of
from bench.engine_shapes import SHAPES
from bench.engine_work import Prompts
from bench.shapes import about, limits_of, options_parser, parse_shape, running
from bench.sse_client import Outcome, Server, complete
from bench.workload import TOKEN_IDS


class ServerWorker:
    """Does the work of a row by asking a server for it: an `engine_work.Worker`."""

    def __init__(self, server: Server, rng: random.Random) -> None:
        self._server = server
        self._rng = rng

    async def throughput_s(self, lens: list[tuple[int, int]]) -> float:
        """Return seconds from sending all requests, as (prompt, output) tokens, to the last token."""
        outcomes = await self._ask([(self._prompt(prompt), output) for prompt, output in lens])
        return max(item.ended_at_s for item in outcomes) - min(item.sent_at_s for item in outcomes)

    async def prefill_s(self, length: int, count: int) -> float:
        """Return seconds from sending `count` prompts to the first token of the last one."""
        outcomes = await self._ask([(self._prompt(length), 1) for _ in range(count)])
        return max(item.ended_at_s for item in outcomes) - min(item.sent_at_s for item in outcomes)

    async def decode_step_s(self, batch: int, context: int, steps: int) -> float:
        """Return the median over `batch` sequences of the mean seconds between two of their tokens."""
        prompts = [self._prompt(context) for _ in range(batch)]
        await self._ask([(prompt, 1) for prompt in prompts])
        outcomes = await self._ask([(prompt, steps + 1) for prompt in prompts])
        return statistics.median(item.tbt_s for item in outcomes)

    def _prompt(self, length: int) -> list[int]:
        return self._rng.choices(TOKEN_IDS, k=length)

    async def _ask(self, asked: list[tuple[list[int], int]]) -> list[Outcome]:
        outcomes = await asyncio.gather(*(complete(self._server, prompt, output) for prompt, output in asked))
        for outcome, (_, output) in zip(outcomes, asked, strict=True):
            if outcome.error or outcome.output_tokens != output:
                raise RuntimeError(f"{outcome.output_tokens} of {output} tokens came: {outcome.error}")
        return list(outcomes)


def of_engine(row: Row, alone: float) -> float:
    """Return how much of the engine's speed is left; `alone`: its value of the row."""
    return row.value / alone if row.unit == "tok/s" else alone / row.value


def main() -> None:
    parser = options_parser(__doc__, max_model_len=33_024)
    parser.set_defaults(max_batch=256, ahead_s=8.0)
    parser.add_argument("--engine", type=Path, required=True, help="a report of bench.engine on this machine")
    parser.add_argument("--chunk", type=int, default=32_768)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", default="", help="only rows with this in their name")
    options = parser.parse_args()
    alone = {row["workload"]: row["value"] for row in json.loads(options.engine.read_text())["rows"]}
    work = work_of(SHAPES[options.model], 1)
    rows = [
        row
        for row in rows_of(options.model, work, Prompts(len(TOKEN_IDS), 0))
        if options.rows in row.workload
    ]
    shown = []
    with running(
        options.model, parse_shape(f"1c@{options.chunk}"), limits_of(options), options.logs
    ) as cluster:
        worker = ServerWorker(Server(cluster.url, options.model), random.Random(0))
        for row in rows:
            found = uvloop.run(run_row(row, worker, options.repeats))
            share = of_engine(found, alone[row.workload])
            print(
                f"{row.workload:45} {found.value:9,.2f} {row.unit:5} {share:6.3f} of the engine alone",
                flush=True,
            )
            shown.append({**asdict(found), "engine": alone[row.workload], "of_engine": share})
    write_result(options.out, {**about(options.commit), "rows": shown})


if __name__ == "__main__":
    main()
