"""A small model whose vocabulary has a tokenizer, and what it says under a grammar, found the slow way."""

import json
from collections.abc import Sequence as Items

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from base.grammar import MaskFiller, Vocabulary
from base.request import Grammar, GrammarKind, StopParams
from engine.sequence import Sequence
from tests.conductor.fakes import byte_level_tokenizer
from tests.engine.builders import make_sequence

VOCAB_SIZE = 272
"""A few more than the tokenizer has, as models are padded."""
END = 0
TOKENIZER: Tokenizer = byte_level_tokenizer()
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ages": {"type": "array", "maxItems": 3}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
    Grammar(GrammarKind.REGEX, "(he|wo)+[0-9]{3,5}"),
    Grammar(GrammarKind.LARK, 'start: "hello " ("a" | "b")+ "."'),
)


def make_spelling_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def constrained_sequence(
    vocabulary: Vocabulary, name: str, prompt: Items[int], grammar: Grammar, max_tokens: int = 40, **fields
) -> Sequence:
    stop = StopParams(max_tokens, fields.pop("min_tokens", 0), (END,))
    sequence = make_sequence(name, prompt, stop=stop, **fields)
    sequence.constraint = vocabulary.constraint(grammar, stop)
    return sequence


@torch.no_grad()
def constrained_reference(
    model: PreTrainedModel, vocabulary: Vocabulary, prompt: Items[int], grammar: Grammar, max_tokens: int = 40
) -> list[int]:
    """Return what the model says greedily, each token by a whole forward pass and a mask of its own."""
    said: list[int] = []
    while len(said) < max_tokens and END not in said:
        constraint = vocabulary.constraint(grammar, StopParams(max_tokens, 0, (END,)))
        constraint.follow(said)
        masks = np.zeros((1, vocabulary.num_words), np.int32)
        MaskFiller(1).fill([constraint], masks)
        allowed = torch.from_numpy(np.unpackbits(masks.view(np.uint8), bitorder="little")[:VOCAB_SIZE])
        logits = model(torch.tensor([[*prompt, *said]], device=model.device)).logits[0, -1].cpu()
        said.append(int(logits.masked_fill(allowed == 0, float("-inf")).argmax()))
    return said
