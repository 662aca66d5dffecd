"""`python -m bench.kv_precision`: what KV of 8 bits changes in the answers of a real small model, on a CPU.

Each prompt is answered greedily with KV as the model computes it, then twice with KV of 8 bits: freely,
which shows how many tokens go by until another one is chosen; and along the first answer, which shows how
likely each of its tokens is still. In float32, so that the KV's dtype is all that differs.

    python -m bench.kv_precision --out bench/results/kv_precision_smollm2.json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

from base.block_hash import BlockHash
from base.kv_layout import KvLayout
from base.request import RequestId, SamplingParams, StopParams
from bench.about_run import current_commit
from conductor.api.tokenizer import Tokenizer
from engine.batch import build_batch
from engine.model import PagedModel
from engine.model_store import prepare
from engine.paged_cache import PagedCache
from engine.scaled_kv import scaled_layout
from engine.self_check import require_faithful
from engine.sequence import Sequence
from engine.step import StepEntry, StepPlan
from engine.weights import load_model

BLOCK_SIZE = 64
CHUNK = 50
"""Prompt tokens of a step, no divisor of a block."""

SUBJECTS = (
    "the sea",
    "a good breakfast",
    "prime numbers",
    "the city of Rome",
    "how rain forms",
    "chess",
    "bees",
)
FORMS = (
    "Write a short story about {}.",
    "Explain {} to a child.",
    "A letter to a friend about {}:\n\nDear Anna,",
)


class Forward:
    """One model over one cache, for a sequence at a time."""

    def __init__(self, model: PagedModel, layout: KvLayout, num_tokens: int) -> None:
        self._model = model
        self._layout = layout
        self._num_blocks = layout.num_blocks(num_tokens)
        self._table = tuple(range(self._num_blocks))

    def answer(self, prompt: list[int], count: int, along: list[int] | None = None) -> torch.Tensor:
        """Return log probabilities [count, vocab_size] of an answer: the likeliest tokens, or `along`."""
        cache = PagedCache(self._layout, self._num_blocks, self._model.device)
        sequence = Sequence(
            RequestId("kv"), list(prompt), len(prompt), BlockHash(b""), SamplingParams(), StopParams(count)
        )
        found: list[torch.Tensor] = []
        start = 0
        while len(found) < count:
            size = min(CHUNK, len(sequence.token_ids) - start)
            is_last = start + size == len(sequence.token_ids)
            entry = StepEntry(sequence, start, size, self._table, samples=is_last)
            plan = StepPlan((entry,), num_single=int(size == 1))
            logits = self._model.forward(build_batch(plan, BLOCK_SIZE, self._model.device), cache)
            start += size
            if is_last:
                found.append(logits[0].float().log_softmax(-1))
                token = int(found[-1].argmax()) if along is None else along[len(found) - 1]
                sequence.token_ids.append(token)
        return torch.stack(found)


def compared(model: PagedModel, prompts: list[list[int]], count: int) -> dict[str, float]:
    """Return figures of answers of `count` tokens with KV of 8 bits, beside those with KV as computed."""
    layout = replace(model.shape, block_size=BLOCK_SIZE)
    longest = max(map(len, prompts)) + count
    usual, scaled = (Forward(model, each, longest) for each in (layout, scaled_layout(layout)))
    matched, agreed, errors = [], [], []
    for prompt in prompts:
        expected = usual.answer(prompt, count)
        tokens = expected.argmax(-1)
        free = scaled.answer(prompt, count).argmax(-1)
        along = scaled.answer(prompt, count, tokens.tolist())
        same = (free == tokens).long().cumprod(0).sum()
        matched.append(float(same) / count)
        agreed.append(float((along.argmax(-1) == tokens).float().mean()))
        rows = torch.arange(count)
        errors.append(float((along[rows, tokens] - expected[rows, tokens]).abs().mean()))
    return {
        "prompts": len(prompts),
        "tokens": count,
        "whole_answers_equal": fmean(share == 1.0 for share in matched),
        "tokens_until_another": fmean(matched) * count,
        "next_token_equal": fmean(agreed),
        "mean_log_probability_error": fmean(errors),
        "self_check_off_by": require_faithful(model, scaled_layout(layout)),
        "kv_bytes_of_bfloat16": 2 * scaled_layout(layout).token_bytes / layout.token_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kv_precision", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = Path(prepare(options.model, Path("~/.cache/conductor-cluster"), print).path)
    tokenizer = Tokenizer.load(folder)
    texts = [form.format(subject) for subject in SUBJECTS for form in FORMS]
    texts += [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts]
    chosen = texts[:: max(1, len(texts) // options.prompts)]
    prompts = [list(tokenizer.encode_text(text)) for text in chosen]
    with torch.inference_mode():
        model = PagedModel(load_model(folder, torch.float32, torch.device("cpu")))
        figures = compared(model, prompts, options.tokens)
    about = {"model": options.model, "commit": options.commit or current_commit()}
    text = json.dumps({**about, "rows": [figures]}, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
