"""Checkpoints whose family is Python code of their own are served as one of transformers, which runs none."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from base.clock import SystemClock
from base.config import EngineConfig
from base.errors import ConfigError
from engine.build import build_engine
from engine.model_store import prepare
from engine.weights import load_model, tokens_of
from tests.conductor.fakes import byte_level_tokenizer
from tests.engine.builders import greedy, reference
from tests.engine.test_families import prompts_of
from tests.engine.test_gpu_model import make_family
from tests.engine.test_stored_experts import logits_of, publish

KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
    },
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "ep_size": 1,
    "aux_loss_alpha": 0.001,
    "topk_method": "noaux_tc",
    "torch_dtype": "float32",
    "transformers_version": "4.48.3",
}
"""What config.json of Kimi K2 says besides sizes."""
CODE = "raise SystemExit('the code of a model was run')"


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A tiny random checkpoint as Kimi K2 is published, and transformers' deepseek_v3 of the same numbers."""
    folder = tmp_path_factory.mktemp("kimi")
    make_family("deepseek_v3", n_group=1).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    for key in ("rope_parameters", "dtype"):
        config.pop(key, None)
    own = config | KIMI_K2
    theirs = {key: value for key, value in own.items() if key != "auto_map"} | {"model_type": "deepseek_v3"}
    (folder / "config.json").write_text(json.dumps(theirs))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    (folder / "config.json").write_text(json.dumps(own))
    for name in ("configuration_deepseek.py", "modeling_deepseek.py", "tokenization_kimi.py"):
        (folder / name).write_text(CODE)
    tokenizer = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "tiktoken.model").write_text("IQ== 0\n")
    return folder, model


async def test_kimi_k2_says_what_deepseek_v3_says_to_the_bit(kimi: tuple[Path, PreTrainedModel]) -> None:
    folder, model = kimi
    assert model.config.rope_parameters["rope_type"] == "yarn"
    loaded = load_model(folder, torch.float32)
    assert loaded.config.model_type == "deepseek_v3"
    assert loaded.config.rope_parameters == model.config.rope_parameters
    tokens = torch.tensor([prompts_of(1)[1]])
    with torch.inference_mode():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    config = EngineConfig(device="cpu", block_size=16, kv_cache_gib=0.002, threads=1, chunk_tokens=23)
    engine = build_engine(config, str(folder), SystemClock())
    assert (engine.family, [field.name for field in engine.layout.fields]) == (
        "deepseek_v3",
        ["latent", "rotary_key"],
    )
    prompts = prompts_of(1)
    expected = [reference(model, prompt, 12) for prompt in prompts]
    assert await greedy(engine.loop, prompts, 12) == expected


def test_kimi_k2_as_it_is_published_in_blocks_of_8_bit_floats(tmp_path: Path) -> None:
    folder = publish(tmp_path, "deepseek_v3", "blocks")
    config = json.loads((folder / "config.json").read_text())
    own = {key: KIMI_K2[key] for key in ("model_type", "auto_map")}
    (folder / "config.json").write_text(json.dumps(config | own))
    expected = logits_of(load_model(folder / "floats", torch.float32))
    torch.testing.assert_close(logits_of(load_model(folder, torch.float32)), expected, rtol=1e-4, atol=1e-4)


def test_a_tokenizer_that_is_code_is_refused_by_name_until_there_is_one_that_is_data(
    kimi: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    folder, _ = kimi
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing; its tokenizer is Python code.*put a"):
        prepare(str(folder), tmp_path, lambda line: None)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    try:
        assert prepare(str(folder), tmp_path, lambda line: None).path == str(folder)
        assert len(tokens_of(folder, "two words")) > 1
    finally:
        (folder / "tokenizer.json").unlink()


def test_another_family_that_is_code_is_refused(kimi: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    folder, _ = kimi
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k9"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="'kimi_k9' is Python code that comes with the model"):
        load_model(tmp_path, torch.float32)
