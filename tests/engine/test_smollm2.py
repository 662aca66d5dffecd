"""SmolLM2 through the engine: the same tokens as transformers' `generate`. The specification."""

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from base.request import StopParams
from bench.upcycle import upcycled
from engine.loop import EngineLoop
from engine.model import PagedModel
from engine.model_store import prepare
from engine.packed_linear import pack_linears
from engine.weights import load_model
from tests.engine.builders import greedy, make_loop, reference

CACHE_DIR = Path("~/.cache/conductor-cluster")
EOS = 2
NEW_TOKENS = 12

SHORT = [
    "Hello",
    "The capital of France is",
    "Die Hauptstadt von Deutschland ist",
    "La capital de España es",
    "日本の首都は",
    "Столица России",
    "عاصمة مصر هي",
    "भारत की राजधानी",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "SELECT name FROM users WHERE",
    "🙂🙃🙂🙃",
    "\n\n\n",
    "Il était une fois, dans un petit village,",
]
QUESTIONS = [
    "What is 7 times 6?",
    "Name three primary colours.",
    "¿Cuál es la capital de Perú?",
    "Wie geht es dir?",
]
SYSTEM = (
    "<|im_start|>system\nYou are a careful assistant who answers in one short sentence, names the source of "
    "what is claimed, says so when something is not known, and never invents a figure. The user may write in "
    "any language; the answer is in that language.<|im_end|>\n"
)


def long_text(num_words: int, seed: int) -> str:
    """Sentences that do not repeat, so that a long context stays a real one."""
    rng = random.Random(seed)
    nouns = [
        "harbour",
        "engine",
        "valley",
        "teacher",
        "river",
        "machine",
        "letter",
        "garden",
        "winter",
        "bridge",
    ]
    verbs = ["remembers", "crosses", "repairs", "measures", "describes", "follows", "paints", "answers"]
    words: list[str] = []
    while len(words) < num_words:
        year, who, what = rng.randint(1500, 2020), rng.choice(nouns), rng.choice(nouns)
        words += f"In {year} the {who} {rng.choice(verbs)} a {what}.".split()
    return " ".join(words[:num_words])


def fast_prompts() -> list[str]:
    chats = [f"{SYSTEM}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in QUESTIONS[:2]]
    return [*SHORT[:2], SHORT[4], *chats, long_text(100, seed=1)]


def all_prompts() -> list[str]:
    chats = [f"{SYSTEM}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in QUESTIONS]
    book = long_text(300, seed=2)
    same_start = [f"{book} And so the {ending}" for ending in ("story", "river", "end")]
    lengths = [10, 37, 64, 90, 128, 160, 200, 333]
    return [
        *SHORT,
        *chats,
        *same_start,
        *(long_text(size, seed=size) for size in lengths),
        long_text(2300, seed=3),
    ]


@pytest.fixture(scope="module")
def smollm2():
    folder = Path(prepare("smollm2", CACHE_DIR, print).path)
    torch.set_num_threads(1)
    plain, ours = (load_model(folder, torch.float32) for _ in range(2))
    # As `build_engine` does.
    pack_linears(ours)
    return plain, PagedModel(ours), Tokenizer.from_file(str(folder / "tokenizer.json"))


def tokens_of(smollm2, texts: list[str]) -> list[list[int]]:
    _, _, tokenizer = smollm2
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


async def generated(loop: EngineLoop, prompts: list[list[int]]) -> list[list[int]]:
    return await greedy(loop, prompts, NEW_TOKENS, stop=StopParams(NEW_TOKENS, stop_token_ids=(EOS,)))


@pytest.mark.full
async def test_greedy_tokens_equal_those_of_generate(smollm2) -> None:
    model, paged, _ = smollm2
    prompts = tokens_of(smollm2, fast_prompts())
    expected = [reference(model, prompt, NEW_TOKENS, EOS, "sdpa") for prompt in prompts]
    loop = make_loop(paged, num_blocks=64, block_size=32, chunk_tokens=50)
    assert await generated(loop, prompts) == expected
    assert await generated(loop, prompts) == expected, "with prefixes from the cache"


@pytest.mark.full
async def test_a_mixture_of_equal_experts_made_of_it_gives_the_tokens_of_generate(smollm2) -> None:
    model, _, _ = smollm2
    prompts = tokens_of(smollm2, fast_prompts())
    expected = [reference(model, prompt, NEW_TOKENS, EOS, "sdpa") for prompt in prompts]
    dense = load_model(Path(prepare("smollm2", CACHE_DIR, print).path), torch.float32)
    loop = make_loop(PagedModel(upcycled(dense)), num_blocks=64, block_size=32, chunk_tokens=50)
    assert await generated(loop, prompts) == expected
    assert await generated(loop, prompts) == expected, "with prefixes from the cache"


@pytest.fixture(scope="module")
def expected_of_all(smollm2) -> tuple[list[list[int]], list[list[int]]]:
    prompts = tokens_of(smollm2, all_prompts())
    assert len(prompts) >= 30
    assert max(len(prompt) for prompt in prompts) > 3900
    assert min(len(prompt) for prompt in prompts) == 1
    return prompts, [reference(smollm2[0], prompt, NEW_TOKENS, EOS, "sdpa") for prompt in prompts]


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("chunk_tokens", "max_batch", "num_blocks"),
    [(300, 1, 400), (77, 16, 400), (511, 16, 80)],
    ids=["one at a time", "16 at once", "16 at once in a cache too small for them"],
)
async def test_all_prompts_equal_generate(
    smollm2, expected_of_all, chunk_tokens, max_batch, num_blocks
) -> None:
    prompts, expected = expected_of_all
    loop = make_loop(smollm2[1], num_blocks, 64, chunk_tokens, max_batch)
    assert await generated(loop, prompts) == expected
    assert await generated(loop, prompts) == expected, "with prefixes from the cache"
