"""The configuration of a model's folder: what config.json describes, before a weight is read.

transformers knows the families. A checkpoint that names one which came as Python code of its own is read as
the family whose code that is; code that comes with a model is never run.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from base.errors import ConfigError
from engine.model_store import SAME_FAMILY, config_table

LOAD_ERRORS = (
    *(OSError, ValueError, ImportError, LookupError, RuntimeError, ArithmeticError, TypeError),
    *(AttributeError, AssertionError, MemoryError, SafetensorError, StrictDataclassError),
    struct.error,
)
"""Errors of transformers for a folder or file that it cannot read."""

EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
"""Names that families have for the number of experts of a layer."""


def model_config(path: Path) -> PreTrainedConfig:
    """Return the configuration of a folder's model.

    Raises ConfigError, in one line, if there is none of a known family, or it describes none that runs."""
    table = config_table(path)
    if "auto_map" in table and table.get("model_type") not in (*SAME_FAMILY, *CONFIG_MAPPING):
        known, name = ", ".join(SAME_FAMILY), table.get("model_type")
        raise ConfigError(
            f"{path}: config.json: model_type {name!r:.100} is Python code that comes with the model "
            f"(auto_map), which is not run; of such families {known} can be served"
        )
    with loading(f"{path}: config.json"):
        family = SAME_FAMILY.get(table.get("model_type", ""))
        if family is not None:
            own = {key: value for key, value in table.items() if key not in ("model_type", "auto_map")}
            config: PreTrainedConfig = CONFIG_MAPPING[family].from_dict(own)
        else:
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    _require_choice(path, config.get_text_config())
    return config


def _require_choice(path: Path, config: Any) -> None:
    """Raise ConfigError unless each token can choose as many experts as it shall."""
    count = next((found for name in EXPERTS if isinstance(found := getattr(config, name, None), int)), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    if count is None or not isinstance(chosen, int) or count == chosen == 0:
        return
    if not 1 <= chosen <= count:
        raise ConfigError(f"{path}: config.json: num_experts_per_tok is {chosen}, of {count} experts")
    groups, taken = getattr(config, "n_group", None) or 1, getattr(config, "topk_group", None) or 1
    if not isinstance(groups, int) or groups < 1 or count % groups:
        raise ConfigError(f"{path}: config.json: n_group is {groups}, which does not divide {count} experts")
    if not isinstance(taken, int) or not 1 <= taken <= groups:
        raise ConfigError(f"{path}: config.json: topk_group is {taken}, of {groups} groups")
    if chosen > taken * (count // groups):
        raise ConfigError(
            f"{path}: config.json: num_experts_per_tok is {chosen}, and {taken} groups have "
            f"{taken * (count // groups)} experts"
        )


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Raise ConfigError, in one line, where transformers cannot read `what` in the body."""
    try:
        yield
    except LOAD_ERRORS as error:
        raise ConfigError(f"{what}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """Return what an error says, in one line: the next one too where the first one announces it."""
    if isinstance(error, KeyError) and error.args:
        return f"{error.args[0]!r} is unknown"
    first, _, rest = str(error).strip().partition("\n")
    if first.endswith(":") and rest.strip():
        first = f"{first} {rest.strip().partition(chr(10))[0]}"
    return first or type(error).__name__
