"""The model that is served, as the conductor knows it: words, limits, habits.

All of it is read once from the small files of the model's folder (config.json,
generation_config.json, tokenizer_config.json, tokenizer.json, chat_template.jinja,
modules.json); the weights are the nodes' business.

A request that names no temperature, top_p and so on gets the model's own from
generation_config.json, and OpenAI's (temperature 1, nothing cut off) where that file is
silent. vLLM does the same. Always using OpenAI's was weighed: small models are tuned for
narrower sampling than that, and their authors say so in this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import ConfigError
from base.request import SAMPLING_FIELDS, SamplingParams
from base.tables import read_object
from conductor.api.chat_template import ChatTemplate
from conductor.api.embeddings.rule import EmbeddingRule, embedding_rule
from conductor.api.parsing.families import FORMS, family_of
from conductor.api.tokenizer import Tokenizer

PLAIN = "plain"
"""The family of a model whose answers are text alone."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model a conductor serves."""

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """Maker of prompts of conversations; None: the model is no chat model, and chat requests are refused."""
    max_model_len: int
    """Tokens of prompt and answer together."""
    vocab_size: int
    """Token ids are below it."""
    eos_token_ids: tuple[int, ...]
    folder: Path
    """The model's, with its tokenizer."""
    embedding: EmbeddingRule
    """How vectors are made of texts, or why none are."""
    sampling: SamplingParams
    """How the model is sampled where the client does not say; the seed is drawn."""
    family: str = ""
    """How the model writes reasoning and calls, by the table of families; empty: as text alone."""

    @property
    def has_tools(self) -> bool:
        """Whether the chat template has a place for tools."""
        return self.chat_template is not None and self.chat_template.has_tools

    @property
    def thinks(self) -> bool:
        """Whether the model is one that reasons before it answers."""
        form = FORMS.get(self.family)
        source = self.chat_template.source if self.chat_template is not None else ""
        return form is not None and form.think is not None and any(mark in source for mark in form.think)


def load_served_model(folder: Path, name: str, family: str = "") -> ServedModel:
    """Read a model's folder: config.json, tokenizer.json and, if they are there, the other files.

    Raises ConfigError if a file is missing or says what we cannot serve. Clients call the model `name`. Where
    `family` is empty, the chat template shows it; `plain` is none.
    """
    if family not in ("", PLAIN, *FORMS):
        raise ConfigError(
            f"server.model_family: one of {PLAIN}, {', '.join(FORMS)} is wanted, not {family!r}"
        )
    config = read_object(folder / "config.json")
    # A multimodal model keeps its language model's configuration one level down.
    text_config = config.get("text_config", config)
    if not isinstance(text_config, dict):
        raise ConfigError(f"{folder / 'config.json'}: text_config: a JSON object is wanted")
    generation = _read_json_or_empty(folder / "generation_config.json")
    tokenizer_config = _read_json_or_empty(folder / "tokenizer_config.json")
    tokenizer = Tokenizer.load(folder)
    special_tokens = _special_tokens(
        {**_read_json_or_empty(folder / "special_tokens_map.json"), **tokenizer_config}
    )
    max_model_len = _trained_len(text_config, tokenizer_config)
    if not max_model_len:
        raise ConfigError(f"{folder / 'config.json'}: no max_position_embeddings to take max_model_len from")
    vocab_size = text_config.get("vocab_size", tokenizer.vocab_size)
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ConfigError(f"{folder / 'config.json'}: vocab_size: a number of tokens is wanted")
    chat_template = _chat_template(folder, tokenizer_config, special_tokens)
    found = family_of(chat_template.source) if chat_template is not None else ""
    return ServedModel(
        name=name,
        tokenizer=tokenizer,
        chat_template=chat_template,
        embedding=embedding_rule(folder, text_config),
        family="" if family == PLAIN else family or found,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=_eos_token_ids(tokenizer, special_tokens, generation, text_config, vocab_size),
        folder=folder,
        sampling=SamplingParams()._replace(**_checked(_recommended(generation))),
    )


def _read_json_or_empty(path: Path) -> dict[str, Any]:
    return read_object(path) if path.exists() else {}


def _special_tokens(table: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token and its like; a token is its text, or an object with it."""
    tokens = {}
    for key, value in table.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens


def _chat_template(
    folder: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    path, where = folder / "chat_template.jinja", "tokenizer_config.json: chat_template"
    try:
        source = path.read_text() if path.exists() else tokenizer_config.get("chat_template")
        if isinstance(source, list):
            # Several named ones: for tools, for retrieval. The plain one is "default".
            source = {item["name"]: item["template"] for item in source}.get("default")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{folder}: the chat template cannot be read: {error}") from error
    if not source:
        return None
    if not isinstance(source, str):
        raise ConfigError(f"{folder}: {where}: a text is wanted, not {source!r:.100}")
    return ChatTemplate(source, special_tokens)


def _trained_len(text_config: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> int:
    """Return the context window in tokens, or 0 where no file says."""
    positions = text_config.get("max_position_embeddings") or text_config.get("n_positions") or 0
    # transformers writes 1e30 for a tokenizer without a limit.
    tokenizer_len = tokenizer_config.get("model_max_length") or 0
    for name, value in (("max_position_embeddings", positions), ("model_max_length", tokenizer_len)):
        if not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigError(f"{name}: a number of tokens is wanted, not {value!r:.100}")
    limits = filter(None, (positions, tokenizer_len, _same_angles_len(text_config)))
    return int(min(limits)) if positions else 0


def _same_angles_len(text_config: Mapping[str, Any]) -> int:
    """Return the tokens up to which `longrope` turns keys alike, as `engine/model.py` serves; 0: no bound."""
    rope = text_config.get("rope_parameters") or text_config.get("rope_scaling")
    # Of some families there is one for each type of layer.
    rules = [rope, *rope.values()] if isinstance(rope, dict) else []
    name = "original_max_position_embeddings"
    # Where both name it, transformers goes by the outer one for some families: the least is served by all.
    found = [
        at.get(name)
        for rule in rules
        if isinstance(rule, dict) and rule.get("rope_type", rule.get("type")) in ("longrope", "su")
        for at in (rule, text_config)
    ]
    return min((value for value in found if isinstance(value, int) and value > 0), default=0)


def _eos_token_ids(
    tokenizer: Tokenizer,
    special_tokens: Mapping[str, str],
    generation: Mapping[str, Any],
    text_config: Mapping[str, Any],
    vocab_size: int,
) -> tuple[int, ...]:
    """Return every token that ends a sequence: what generation_config.json names, or else
    config.json, and the tokenizer's own, which chat models end their turns with.

    One that the model has no logit of is never sampled, and is left out. Raises ConfigError for no ids."""
    named = generation.get("eos_token_id", text_config.get("eos_token_id"))
    token_ids: Iterable[int | None] = named if isinstance(named, list) else [named]
    own = tokenizer.token_id_or_none(special_tokens.get("eos_token", ""))
    for token_id in token_ids:
        if token_id is not None and (not isinstance(token_id, int) or token_id < 0):
            raise ConfigError(f"eos_token_id: ids of tokens are wanted, not {token_id!r:.100}")
    found = {token_id for token_id in (*token_ids, own) if token_id is not None}
    return tuple(sorted(token_id for token_id in found if token_id < vocab_size))


def named_sampling(sampling: SamplingParams) -> dict[str, float]:
    """Return what a model itself recommends: its defaults that are not OpenAI's."""
    return {
        name: value
        for name, value in _recommended(sampling._asdict()).items()
        if value != getattr(SamplingParams(), name)
    }


def _checked(recommended: dict[str, Any]) -> dict[str, Any]:
    """Return what a generation_config.json recommends; raises ConfigError for what no request may ask for."""
    checked = {}
    for name, given in recommended.items():
        field, kind = SAMPLING_FIELDS[name], type(getattr(SamplingParams(), name))
        value = int(given) if kind is int and isinstance(given, float) and given.is_integer() else given
        if name == "top_p" and value == 0:
            continue  # which would leave no token: files have it beside do_sample: false
        is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        if not is_number or not field.low <= value <= field.high:
            raise ConfigError(
                f"generation_config.json: {name}: a number between {field.low:g} and {field.high:g} is "
                f"wanted, not {value!r:.100}"
            )
        checked[name] = value
    return checked


def _recommended(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a table that a model may recommend."""
    return {
        name: table[name]
        for name, field in SAMPLING_FIELDS.items()
        if field.has_models_default and table.get(name) is not None
    }
