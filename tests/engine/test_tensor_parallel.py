"""Ranks that hold a part of a model each say what one rank with all of it says."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from base.errors import ConfigError
from engine.tensor_parallel import TensorGroup, cut_model
from tests.engine.tensor_rank import logits_of
from tests.engine.test_gpu_model import make_family

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3", "phi", "mixtral", "deepseek_v3", "mixtral in fp8"])
def test_two_ranks_over_gloo_give_the_logits_of_one(family: str, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine.tensor_rank", family, str(rank), "2", str(tmp_path)],
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    expected = logits_of(family, None)
    for index in range(2):
        logits = torch.from_numpy(np.load(tmp_path / f"{index}.npy"))
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("phi3", 2, "split_input|gather_output"),
        ("llama", 4, "heads do not divide"),
        ("opt", 2, "no plan"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(family: str, size: int, message: str) -> None:
    model = make_family(family)
    config = model.config
    heads = (config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads))
    # No collective runs, so no group is needed.
    group = TensorGroup(dist.ProcessGroup(0, size), 0, size)
    with pytest.raises(ConfigError, match=message):
        cut_model(model.base_model, getattr(config, "base_model_tp_plan", None) or {}, heads, group)
