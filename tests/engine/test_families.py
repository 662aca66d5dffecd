"""Every family is served as transformers computes it, or refused by name."""

import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from base.errors import ConfigError
from engine.model import PagedModel
from tests.engine.builders import greedy, make_loop, make_model, reference

SMALL = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENTS = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    **EXPERTS,
}

FAMILIES = {
    "llama": {},
    "llama with all heads": {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": True},
    "llama with one KV head and scaled rope": {
        "model_type": "llama",
        "num_key_value_heads": 1,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
    "gemma": {},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 24, "query_pre_attn_scalar": 16},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 96},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_neox": {},
    "olmo2": {},
    "granite": {},
    "mixtral": {"num_local_experts": 4, **EXPERTS},
    "qwen3_moe": {"num_experts": 4, "norm_topk_prob": True, **EXPERTS},
    "gpt_oss": {
        "num_local_experts": 4,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        **EXPERTS,
    },
    "deepseek_v2": {**LATENTS, "topk_method": "greedy"},
    "deepseek_v2 with queries of low rank and groups of experts": {
        "model_type": "deepseek_v2",
        **LATENTS,
        "q_lora_rank": 32,
        "topk_method": "group_limited_greedy",
        "n_group": 2,
    },
    "deepseek_v3": {**LATENTS, "q_lora_rank": 32, "n_group": 2},
    "deepseek_v3 with scaled rope": {
        "model_type": "deepseek_v3",
        **LATENTS,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        },
    },
    "glm4_moe_lite": {**LATENTS, "q_lora_rank": 32},
}
SHARED_KEYS_UNKNOWN_TO = {
    "falcon": ("head_dim",),
    "gpt2": ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
}


def random_model(family: str, **changes):
    values = SMALL | changes
    model_type = values.pop("model_type", family)
    for key in SHARED_KEYS_UNKNOWN_TO.get(model_type, ()):
        values.pop(key)
    config = AutoConfig.for_model(model_type, **values)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def prompts_of(seed: int) -> list[list[int]]:
    """Some alone in the world, some with a prefix in common, one of one token."""
    rng = random.Random(seed)
    prefix = [rng.randrange(1, 211) for _ in range(37)]
    tails = [[rng.randrange(1, 211) for _ in range(size)] for size in (1, 12, 60)]
    return [[5], [rng.randrange(1, 211) for _ in range(90)], *(prefix + tail for tail in tails), prefix]


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_tokens_equal_those_of_generate(family: str) -> None:
    model = random_model(family, **FAMILIES[family])
    prompts = prompts_of(seed=1)
    expected = [reference(model, prompt, 12) for prompt in prompts]
    loop = make_loop(make_model(model), chunk_tokens=23)
    assert await greedy(loop, prompts, 12) == expected
    # Once more: now every prompt has a prefix in the cache.
    assert await greedy(loop, prompts, 12) == expected


@pytest.mark.parametrize("family", ["falcon", "mamba", "bloom"])
def test_a_family_without_the_attention_backend_is_refused_by_name(family: str) -> None:
    model = random_model(family)
    with pytest.raises(ConfigError, match=rf"'{family}' cannot be served"):
        PagedModel(model)


def test_a_family_that_drops_the_batch_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'nemotron' cannot be served: it does not hand the batch on"):
        PagedModel(random_model("nemotron"))


def test_a_family_that_makes_masks_of_its_own_is_refused_by_name() -> None:
    # Its window is longer than what the self-check computes, which sees no difference.
    model = random_model("doge", keep_window_size=100)
    with pytest.raises(ConfigError, match="'doge' cannot be served: its layers make attention masks"):
        PagedModel(model)


def test_a_family_whose_layers_read_a_mask_is_refused_by_name() -> None:
    # An indexer reads it, and no mask is made once the model serves.
    model = random_model("deepseek_v32", **LATENTS | {"q_lora_rank": 32})
    with pytest.raises(ConfigError, match="'deepseek_v32' cannot be served: it does not hand the batch on"):
        PagedModel(model)


def test_a_family_that_attends_to_keys_of_no_token_is_refused_by_name() -> None:
    changes = {"num_key_value_heads": 1, "q_lora_rank": 32, "sliding_window": 24, **EXPERTS}
    model = random_model("deepseek_v4", num_hidden_layers=4, n_routed_experts=4, **changes)
    with pytest.raises(
        ConfigError, match="DeepseekV4Attention attends to other keys than those of its tokens"
    ):
        make_model(model)


def test_a_window_that_a_mask_has_and_attention_does_not_is_refused_by_name() -> None:
    changes = {"num_experts": 4, "shared_expert_intermediate_size": 48, **EXPERTS, "sliding_window": 100}
    make_model(random_model("qwen2_moe", **changes))
    windows = random_model("qwen2_moe", **changes, use_sliding_window=True, max_window_layers=1)
    with pytest.raises(ConfigError, match=r"'qwen2_moe' cannot be served: the mask .* a window of 100"):
        PagedModel(windows)
    longer = changes | {"sliding_window": SMALL["max_position_embeddings"]}
    make_model(random_model("qwen2_moe", **longer, use_sliding_window=True, max_window_layers=1))


async def test_a_family_whose_angles_change_in_long_sequences_is_served_until_they_do() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rule = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    model = random_model("phi3", original_max_position_embeddings=64, rope_parameters=rule)
    paged = make_model(model)
    assert paged.max_model_len == 64
    prompts = [prompt[:52] for prompt in prompts_of(seed=1)]
    expected = [reference(model, prompt, 12) for prompt in prompts]
    loop = make_loop(paged, chunk_tokens=23)
    assert await greedy(loop, prompts, 12) == expected
    (cut,) = await greedy(loop, [prompts[1]], 20)
    assert len(cut) == 12, "the thirteenth would lie past the change"


def test_a_hybrid_that_keeps_other_state_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'minimax' cannot be served"):
        make_model(random_model("minimax", num_local_experts=4, block_size=16, **EXPERTS))
