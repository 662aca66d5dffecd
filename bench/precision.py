"""`python -m bench.precision`: what fewer bits change in the answers of a real small model, on a CPU.

Weights of each format, and KV of 8 bits, are held against float32. Perplexity is that of `precision.txt`,
prose that no weight was fitted to; it stays as it is, so that figures of different commits compare. Each
prompt is answered greedily, freely, which shows how many tokens go by until another one is chosen, and along
the float model's answer, which shows how likely each of its tokens is still. All goes through the paged
cache, by the code that serves.

The smallest model that an index of packages carries is published in 4 bits itself, in groups of 32 inputs.
Groups of ours that coincide with those would find its very levels again, which says nothing of a float
checkpoint. So its channels are put in another order first, which changes no answer.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean

import torch
from transformers import PreTrainedModel

from base.block_hash import BlockHash
from base.kv_layout import KvLayout
from base.request import RequestId, SamplingParams, StopParams
from bench.about_run import about_run, write_result
from conductor.api.tokenizer import Tokenizer
from engine.batch import build_batch
from engine.model import PagedModel
from engine.model_store import prepare
from engine.packed_linear import pack_linears
from engine.paged_cache import PagedCache
from engine.quantization import quantize
from engine.quantized_linear import use_cpu_products
from engine.quantized_weight import WeightFormat
from engine.scaled_kv import scaled_layout
from engine.sequence import Sequence
from engine.step import StepEntry, StepPlan
from engine.weights import load_model

BLOCK_SIZE = 64
WINDOW = 512
"""Tokens of the text that see each other."""

TEXT = Path(__file__).with_name("precision.txt")

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
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def plain_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the token ids of `text`, in which names of special tokens stay text."""
    cut = "\0cut\0"
    return tokenizer.encode(tokenizer.with_specials_cut(text.replace(cut, ""), cut), False, cut)


def prompts_for(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Return `count` prompts at most, half of them as a chat."""
    texts = [form.format(subject) for subject in SUBJECTS for form in FORMS]
    texts += [CHAT.format(text) for text in texts]
    return [list(plain_ids(tokenizer, text)) for text in texts[:: max(1, len(texts) // count)]]


@torch.no_grad()
def shuffle_channels(model: PreTrainedModel, seed: int = 1) -> None:
    """Put the channels of a Llama or Gemma in another order, in place: hidden states, and within each layer.

    Its logits stay what they were but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    config, decoder = model.config, model.model

    def order(size: int) -> torch.Tensor:
        return torch.randperm(size, generator=generator)

    def take(parameter: torch.nn.Parameter, dim: int, places: torch.Tensor) -> None:
        parameter.data = parameter.data.index_select(dim, places).contiguous()

    hidden = order(config.hidden_size)
    take(decoder.embed_tokens.weight, 1, hidden)
    take(decoder.norm.weight, 0, hidden)
    if model.lm_head.weight is not decoder.embed_tokens.weight:
        take(model.lm_head.weight, 1, hidden)
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for module in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            take(module.weight, 1, hidden)
        for parameter in (attention.o_proj.weight, mlp.down_proj.weight):
            take(parameter, 0, hidden)
        for name, parameter in layer.named_parameters():
            if "layernorm" in name:
                take(parameter, 0, hidden)
        between = order(config.intermediate_size)
        for parameter, dim in ((mlp.gate_proj.weight, 0), (mlp.up_proj.weight, 0), (mlp.down_proj.weight, 1)):
            take(parameter, dim, between)


@dataclass(frozen=True)
class Text:
    """What perplexity is that of."""

    token_ids: list[int]
    start: list[int]
    """What the tokenizer puts before any text: a model that learned to see it says nothing without."""

    def windows(self) -> Iterator[list[int]]:
        """Yield parts of equal length, each as if it were a text of its own."""
        size = WINDOW - len(self.start)
        for at in range(0, len(self.token_ids) - size + 1, size):
            yield self.start + self.token_ids[at : at + size]


@dataclass(frozen=True)
class Answers:
    """What a model says to each prompt."""

    tokens: torch.Tensor
    """[num_prompts, count]: the likeliest at each place."""
    log_probabilities: torch.Tensor
    """[num_prompts, count]: of the tokens that were followed."""


class Reader:
    """One model over caches of one layout."""

    def __init__(self, model: PagedModel, layout: KvLayout) -> None:
        self._model = model
        self._layout = layout

    def perplexity(self, text: Text) -> float:
        """Return that of a text, window by window; the first token of each is given."""
        losses = [self._loss(window) for window in text.windows()]
        return math.exp(fmean(losses))

    def _loss(self, window: list[int]) -> float:
        table = tuple(range(self._layout.num_blocks(len(window))))
        cache = PagedCache(self._layout, len(table), self._model.device)
        entry = StepEntry(_sequence(window), 0, len(window), table, samples=True)
        batch = build_batch(StepPlan((entry,), 0), self._layout.block_size, self._model.device)
        logits = self._model.forward(replace(batch, logit_rows=torch.arange(len(window) - 1)), cache)
        return float(torch.nn.functional.cross_entropy(logits.float(), torch.tensor(window[1:])))

    def answers(self, prompts: list[list[int]], count: int, along: torch.Tensor | None = None) -> Answers:
        """Answer all prompts at once with `count` tokens: the likeliest, or those of `along`."""
        each = self._layout.num_blocks(max(map(len, prompts)) + count)
        cache = PagedCache(self._layout, each * len(prompts), self._model.device)
        tables = [tuple(range(place * each, (place + 1) * each)) for place in range(len(prompts))]
        sequences = [_sequence(prompt) for prompt in prompts]
        tokens, chances = [], []
        for step in range(count):
            entries = tuple(
                StepEntry(
                    sequence,
                    len(sequence.token_ids) - 1 if step else 0,
                    1 if step else len(sequence.token_ids),
                    table,
                    samples=True,
                )
                for sequence, table in zip(sequences, tables, strict=True)
            )
            plan = StepPlan(entries, num_single=len(entries) if step else 0)
            logits = self._model.forward(
                build_batch(plan, self._layout.block_size, self._model.device), cache
            )
            chances.append(logits.float().log_softmax(-1))
            tokens.append(chances[-1].argmax(-1))
            followed = tokens[-1] if along is None else along[:, step]
            chances[-1] = chances[-1].gather(1, followed[:, None])[:, 0]
            for sequence, token in zip(sequences, followed.tolist(), strict=True):
                sequence.token_ids.append(token)
        return Answers(torch.stack(tokens, 1), torch.stack(chances, 1))


def _sequence(token_ids: list[int]) -> Sequence:
    return Sequence(
        RequestId("p"), list(token_ids), len(token_ids), BlockHash(b""), SamplingParams(), StopParams(1)
    )


@dataclass(frozen=True)
class Work:
    """What each format is asked."""

    text: Text
    prompts: list[list[int]]
    count: int


def compared(
    reader: Reader, work: Work, expected: Answers, float_perplexity: float
) -> dict[str, float | int]:
    """Return the figures of one format, beside those of floats."""
    perplexity = reader.perplexity(work.text)
    free = reader.answers(work.prompts, work.count)
    along = reader.answers(work.prompts, work.count, expected.tokens)
    same = (free.tokens == expected.tokens).long().cumprod(1).sum(1).float()
    return {
        "perplexity": perplexity,
        "perplexity_of_floats": perplexity / float_perplexity,
        "greedy_match": float((along.tokens == expected.tokens).float().mean()),
        "tokens_until_another": float(same.mean()),
        "whole_answers_equal": float((same == work.count).float().mean()),
        "mean_log_probability_error": float(
            (along.log_probabilities - expected.log_probabilities).abs().mean()
        ),
    }


def rows_of(folder: Path, work: Work, shuffled: bool) -> Iterator[dict[str, object]]:
    """Yield the figures of float32, of KV of 8 bits, and of each format of weights."""

    def loaded() -> PreTrainedModel:
        module = load_model(folder, torch.float32)
        if shuffled:
            shuffle_channels(module)
        return module

    module = loaded()
    pack_linears(module)
    model = PagedModel(module)
    layout = replace(model.shape, block_size=BLOCK_SIZE)
    floats = Reader(model, layout)
    perplexity = floats.perplexity(work.text)
    expected = floats.answers(work.prompts, work.count)
    yield {"what": "float32", "perplexity": perplexity}
    kv = compared(Reader(model, scaled_layout(layout)), work, expected, perplexity)
    share = 2 * scaled_layout(layout).token_bytes / layout.token_bytes
    yield {"what": "KV in fp8", "kv_bytes_of_bfloat16": share, **kv}
    for weight_format in WeightFormat:
        module = loaded()
        quantize(module, weight_format, folder)
        use_cpu_products(module)
        pack_linears(module)
        figures = compared(Reader(PagedModel(module), layout), work, expected, perplexity)
        yield {"what": f"weights in {weight_format.value}", **figures}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.precision", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="as in cluster.yaml")
    parser.add_argument("--text-tokens", type=int, default=16 * WINDOW)
    parser.add_argument("--prompts", type=int, default=14)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--as-published", action="store_true", help="leave channels in their order")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = Path(prepare(options.model, Path("~/.cache/conductor-cluster"), print).path)
    tokenizer = Tokenizer.load(folder)
    start = list(tokenizer.encode("", add_special_tokens=True))
    token_ids = list(plain_ids(tokenizer, TEXT.read_text()))[: options.text_tokens]
    text = Text(token_ids, start)
    prompts = [start + prompt for prompt in prompts_for(tokenizer, options.prompts)]
    work = Work(text, prompts, options.tokens)
    rows = []
    with torch.inference_mode():
        for row in rows_of(folder, work, not options.as_published):
            print(json.dumps(row), flush=True)
            rows.append(row)
    result = {
        "bench": "precision",
        "about": about_run("torch", "transformers"),
        "model": Path(options.model).name,
        "channels": "as published" if options.as_published else "in another order",
        "text_tokens": sum(map(len, text.windows())),
        "text_sha256": sha256(json.dumps(token_ids).encode()).hexdigest()[:16],
        "prompts": len(work.prompts),
        "tokens": options.tokens,
        "rows": rows,
    }
    write_result(options.out, result)


if __name__ == "__main__":
    main()
