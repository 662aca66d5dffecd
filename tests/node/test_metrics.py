"""What a node says of its steps is what its steps did."""

from base.metrics import NodeMetrics, exposition, process_registry, samples_of
from node.metrics import observe
from tests.engine.test_gpu_model import make_family
from tests.node.ranked_node import BLOCK_SIZE, asked_node

CHUNK_TOKENS = 48
PROMPT = [3 + (11 * index) % 200 for index in range(2 * CHUNK_TOKENS + 1)]
"""Its last chunk has one token, computed or found."""


async def test_every_token_of_a_prompt_is_counted_as_computed_or_as_matched(tmp_path):
    make_family("llama").save_pretrained(tmp_path)
    registry = process_registry()
    async with asked_node(tmp_path, 1, 1) as node:
        observe(NodeMetrics(registry), node.engine)
        found = [(await node.answer(PROMPT))[1] for _ in range(2)]
        samples = list(samples_of(exposition(registry).decode()))
    assert found == [0, len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE]
    counted = {labels["source"]: value for name, labels, value in samples if name == "prefill_tokens_total"}
    assert counted == {"computed": len(PROMPT) + 1, "matched": found[1]}
