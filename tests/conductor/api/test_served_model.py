import json

import pytest

from base.errors import ConfigError
from base.request import SamplingParams
from conductor.api.chat_template import ChatMessage
from conductor.api.served_model import load_served_model
from tests.conductor.fakes import MAX_MODEL_LEN, write_model_folder


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def folder(tmp_path):
    return write_model_folder(tmp_path)


def test_model_is_read_from_its_folder(folder):
    model = load_served_model(folder, "m")
    assert (model.max_model_len, model.vocab_size) == (MAX_MODEL_LEN, 263)
    assert model.sampling == SamplingParams(temperature=0.5, top_k=7)


def test_sequences_end_with_the_configured_token_and_the_tokenizers_own(folder):
    assert load_served_model(folder, "m").eos_token_ids == (0, 2)


def test_end_token_comes_from_the_config_where_generation_has_none(folder):
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=1)
    assert load_served_model(folder, "m").eos_token_ids == (1, 2)


def test_an_end_token_that_the_model_has_no_logit_of_is_left_out(folder):
    edit(folder / "generation_config.json", eos_token_id=[0, 300])
    edit(folder / "config.json", vocab_size=263)
    assert load_served_model(folder, "m").eos_token_ids == (0, 2)


def test_what_a_file_recommends_is_read_as_it_is_meant(folder):
    edit(folder / "generation_config.json", top_k=20.0, top_p=0, temperature=0, repetition_penalty=1)
    sampling = load_served_model(folder, "m").sampling
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (20, 1.0, 0)


def test_a_chat_template_of_another_type_is_refused(folder):
    (folder / "chat_template.jinja").unlink()
    for template in (5, [5], [{}], True):
        edit(folder / "tokenizer_config.json", chat_template=template)
        with pytest.raises(ConfigError, match="chat"):
            load_served_model(folder, "m")


def test_special_token_may_be_an_object(folder):
    edit(folder / "tokenizer_config.json", eos_token={"content": "<|im_start|>", "special": True})
    assert load_served_model(folder, "m").eos_token_ids == (0, 1)


def test_language_model_of_a_multimodal_one_is_one_level_down(folder):
    (folder / "config.json").write_text(
        json.dumps({"text_config": {"max_position_embeddings": 99, "vocab_size": 5}})
    )
    model = load_served_model(folder, "m")
    assert (model.max_model_len, model.vocab_size) == (99, 5)


@pytest.mark.parametrize(
    ("rope", "beside"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}}, {}),
        ({"rope_scaling": {"type": "longrope"}}, {"original_max_position_embeddings": 64}),
        ({"rope_scaling": {"type": "su"}}, {"original_max_position_embeddings": 64}),
        (
            {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 128}},
            {"original_max_position_embeddings": 64},
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": None}},
            {"original_max_position_embeddings": 64},
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 64},
                    "sliding_attention": {"rope_type": "default"},
                }
            },
            {},
        ),
    ],
)
def test_a_long_rope_is_served_up_to_where_its_angles_change(folder, rope, beside):
    edit(folder / "config.json", max_position_embeddings=999, **rope, **beside)
    assert load_served_model(folder, "m").max_model_len == 64


def test_another_scaling_of_positions_bounds_nothing(folder):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    edit(folder / "config.json", max_position_embeddings=999, rope_scaling=rope)
    assert load_served_model(folder, "m").max_model_len == 999


def test_default_one_of_several_chat_templates_is_used(folder):
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    template = load_served_model(folder, "m").chat_template
    assert template is not None
    assert template.render([ChatMessage("user", "x")]) == "plain"


def test_model_without_a_template_is_no_chat_model(folder):
    (folder / "chat_template.jinja").unlink()
    assert load_served_model(folder, "m").chat_template is None


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", None, "config.json"),
        ("config.json", "[]", "object"),
        ("config.json", "{}", "max_model_len"),
        ("config.json", "[" * 9_000, "config.json"),
        ("config.json", '{"text_config": 5}', "text_config"),
        ("config.json", '{"max_position_embeddings": [1]}', "max_position_embeddings"),
        ("config.json", '{"max_position_embeddings": 9, "vocab_size": "x"}', "vocab_size"),
        ("config.json", '{"max_position_embeddings": 9, "hidden_size": "x"}', "hidden_size"),
        ("tokenizer.json", "{}", "tokenizer"),
        ("tokenizer_config.json", '{"model_max_length": "x"}', "model_max_length"),
        ("generation_config.json", '{"temperature": "x"}', "temperature"),
        ("generation_config.json", '{"temperature": NaN}', "temperature"),
        ("generation_config.json", '{"top_k": 2.5}', "top_k"),
        ("generation_config.json", '{"top_p": 5}', "top_p"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id"),
        ("generation_config.json", '{"eos_token_id": -5}', "eos_token_id"),
        ("chat_template.jinja", "{% if a %}" * 5_000, "chat template"),
    ],
)
def test_unusable_folder_is_refused_by_what_is_wrong_with_it(folder, name, content, says):
    path = folder / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        load_served_model(folder, "m")
