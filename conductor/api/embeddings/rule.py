"""The rule by which a model's vectors are made, as its folder says it.

sentence-transformers writes it down: `modules.json` lists what a text goes through, and the module that
pools has a configuration of its own. Vectors are made here of a decoder's last hidden states, pooled and
brought to length 1, so a model that was trained for anything else is refused, with the reason. A folder that
says nothing is a model for text: then the last token's state is taken, the one that has seen the whole text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from base.errors import ConfigError
from base.request import Pooling
from base.tables import read_json, read_object

MODULES = "modules.json"
_DONE = {"Transformer", "Pooling", "Normalize"}
_MODES = {"lasttoken": Pooling.LAST, "mean": Pooling.MEAN, "weightedmean": Pooling.WEIGHTED_MEAN}
_OLDER_MODES = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}


class EmbeddingRule(NamedTuple):
    """How a model's vectors are made, or why none are."""

    pooling: Pooling | None
    refusal: str = ""
    hidden_size: int = 0
    """Numbers of a vector."""


def embedding_rule(folder: Path, text_config: Mapping[str, Any]) -> EmbeddingRule:
    """Return the rule of the model in a folder; raises ConfigError for a file that cannot be read."""
    hidden_size = text_config.get("hidden_size") or text_config.get("n_embd") or 0
    if not isinstance(hidden_size, int):
        raise ConfigError(f"config.json: hidden_size: a whole number is wanted, not {hidden_size!r:.100}")
    if not hidden_size:
        return EmbeddingRule(None, "config.json does not say how long its hidden states are")
    if text_config.get("is_causal") is False or text_config.get("use_bidirectional_attention"):
        return EmbeddingRule(None, "it was trained to look ahead, and this server's attention looks back")
    if not (folder / MODULES).is_file():
        return EmbeddingRule(Pooling.LAST, hidden_size=hidden_size)
    pooling, refusal = Pooling.LAST, ""
    for module in _listed(folder / MODULES):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _DONE:
            refusal = refusal or f"{MODULES} names a module of type {kind[:100]!r}, which is not done here"
        if kind == "Pooling":
            modes = _modes(read_object(folder / str(module.get("path", "")) / "config.json"))
            if len(modes) == 1 and modes[0] in _MODES:
                pooling = _MODES[modes[0]]
            else:
                refusal = (
                    refusal or f"its pooling is {'+'.join(modes)[:100]!r}: one of {', '.join(_MODES)} is done"
                )
    return EmbeddingRule(None, refusal) if refusal else EmbeddingRule(pooling, hidden_size=hidden_size)


def _modes(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the modes that a pooling module joins."""
    if "pooling_mode" in config:
        named = config["pooling_mode"]
        return [str(each) for each in named] if isinstance(named, list) else [str(named)]
    return [mode for name, mode in _OLDER_MODES.items() if config.get(name)]


def _listed(path: Path) -> list[dict[str, Any]]:
    found = read_json(path)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ConfigError(f"{path}: a JSON list of objects is wanted")
    return found
