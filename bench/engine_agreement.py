"""`python -m bench.engine_agreement`: what the engine says in bfloat16 against float32.

Two correct bfloat16 programs differ. So three are compared on a model of Qwen3-0.6B's
shape with random weights: transformers in float32 (the reference), transformers in
bfloat16 with eager attention, and our engine, compiled, captured and batched. The engine
generates greedily; the other two read what it generated. Reported are the error of the
log probability of each generated token against float32, and how often the float32 model
would have chosen the same token, for the engine and for transformers' bfloat16.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
from pathlib import Path

import torch
from transformers import PreTrainedModel

from base.clock import SystemClock
from base.config import EngineConfig
from base.request import RequestId, SampledToken, StopParams
from bench.about_run import write_result
from bench.engine_shapes import SHAPES, build_model
from bench.engine_work import GREEDY, ROOT, Prompts, run_to_end, stepping
from engine.build import Engine, assemble_engine
from engine.model import PagedModel
from engine.sequence import Sequence
from engine.step import SequenceOutput

NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 200, 64
CONFIG = EngineConfig(device="cuda", dtype="bfloat16", kv_cache_gib=8, chunk_tokens=512, max_batch=32)


async def generate(engine: Engine, prompts: list[list[int]]) -> list[list[SampledToken]]:
    """Return what the engine samples greedily after each prompt, all at once, with log probabilities."""
    stop = StopParams(NEW_TOKENS)
    sequences = [
        Sequence(RequestId(str(index)), list(prompt), len(prompt), ROOT, GREEDY, stop, num_logprobs=0)
        for index, prompt in enumerate(prompts)
    ]
    results: dict[Sequence, list[SampledToken]] = {sequence: [] for sequence in sequences}

    def heard(output: SequenceOutput) -> None:
        results[output.sequence] += output.tokens

    async with stepping(engine.loop):
        await run_to_end(engine.loop, sequences, heard)
    return list(results.values())


@torch.inference_mode()
def read(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Return float32 log probabilities [NEW_TOKENS, vocab_size] of each generated token's place."""
    logits = model(input_ids=torch.tensor([token_ids], device="cuda"), use_cache=False).logits[0]
    logprobs: torch.Tensor = logits[-NEW_TOKENS - 1 : -1].float().log_softmax(-1)
    return logprobs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    halves = build_model(SHAPES["0.6b"])
    reference = copy.deepcopy(halves).float()
    engine = assemble_engine(CONFIG, PagedModel(copy.deepcopy(halves)), SystemClock())
    source = Prompts(engine.vocab_size, 1)
    prompts = [source.sequence(PROMPT_TOKENS, 1).token_ids for _ in range(NUM_PROMPTS)]
    generated = asyncio.run(generate(engine, prompts))
    ours, theirs, our_same, their_same = [], [], [], []
    for prompt, tokens in zip(prompts, generated, strict=True):
        chosen = torch.tensor([token.token_id for token in tokens], device="cuda")
        exact, rounded = (read(model, [*prompt, *chosen.tolist()]) for model in (reference, halves))
        said = torch.tensor([token.logprobs.logprob for token in tokens if token.logprobs], device="cuda")
        wanted = exact.gather(1, chosen[:, None])[:, 0]
        ours.append((said - wanted).abs().mean().item())
        theirs.append((rounded.gather(1, chosen[:, None])[:, 0] - wanted).abs().mean().item())
        our_same.append((exact.argmax(-1) == chosen).float().mean().item())
        their_same.append((exact.argmax(-1) == rounded.argmax(-1)).float().mean().item())
    report = {
        "logprob_error_engine_bf16": sum(ours) / NUM_PROMPTS,
        "logprob_error_transformers_bf16": sum(theirs) / NUM_PROMPTS,
        "greedy_match_with_float32_engine": sum(our_same) / NUM_PROMPTS,
        "greedy_match_with_float32_transformers_bf16": sum(their_same) / NUM_PROMPTS,
    }
    for name, value in report.items():
        print(f"{name:46} {value:.5f}")
    write_result(options.out, report)


if __name__ == "__main__":
    main()
