"""Rotary embeddings by real numbers are those by complex ones."""

import copy

import torch
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as family

from engine.real_rotary import use_real_rotary
from tests.engine.test_gpu_model import make_family


def test_a_model_shown_real_angles_says_the_same_and_others_keep_complex_ones() -> None:
    reference = make_family("deepseek_v2")
    model = copy.deepcopy(reference)
    use_real_rotary(model)
    use_real_rotary(model)
    token_ids = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(token_ids).logits, reference(token_ids).logits, rtol=1e-4, atol=1e-5)
    angles = [
        each.model.rotary_emb(torch.zeros(1), torch.arange(3)[None]).is_complex()
        for each in (reference, model)
    ]
    assert angles == [True, False]


def test_it_is_done_once_and_to_no_other_family() -> None:
    model = make_family("deepseek_v2")
    use_real_rotary(model)
    turn = family.apply_rotary_emb
    use_real_rotary(make_family("deepseek_v2"))
    assert family.apply_rotary_emb is turn
    llama = make_family("llama")
    before = llama.model.rotary_emb.forward
    use_real_rotary(llama)
    assert llama.model.rotary_emb.forward == before
