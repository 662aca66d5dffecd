"""Libraries that clients use, unmodified: each script of `clients/` runs against the cluster and asserts."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from engine.weights import load_model
from tests.cluster.clients.install import LIBRARIES, CannotInstallError, installed

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

QUESTIONS = [
    ("The capital of France is", [" Paris", " Rome", " Lima"]),
    ("2 + 2 =", [" 5", " 4", " 22"]),
    ("The opposite of hot is", [" cold", " tall", " hot and also humid"]),
]
TEXTS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "Once upon a time, in a small village, there lived a baker.",
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
"""
CHOICES = """
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""
WHOLE = """
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
"""
ANSWERS = """
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["."], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def ran(name, cluster, *arguments):
    """Run a library's script to its end; skips where the library is not to be had."""
    try:
        command = installed(name)
    except CannotInstallError as error:
        pytest.skip(f"{name} cannot be installed here: {error}")
    environment = {
        **os.environ,
        "CONDUCTOR_URL": cluster.url,
        "CONDUCTOR_GRPC": cluster.grpc_address,
        "OPENAI_API_KEY": "none",
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [*command, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=500
    )


@pytest.mark.parametrize("name", sorted(LIBRARIES.keys() - {"lm-eval"}))
def test_a_library_does_what_its_script_says(cluster, name):
    done = ran(name, cluster)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def write_tasks(folder):
    docs, texts = folder / "docs.jsonl", folder / "texts.jsonl"
    lines = [json.dumps({"question": question, "choices": choices}) for question, choices in QUESTIONS]
    docs.write_text("\n".join(lines))
    texts.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    for name, kind, file, rest in (
        ("choices", "multiple_choice", docs, CHOICES),
        ("texts", "loglikelihood_rolling", texts, WHOLE),
        ("answers", "generate_until", docs, ANSWERS),
    ):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, kind=kind, file=file) + rest)


def test_lm_eval_finds_the_likelihoods_of_transformers(cluster, smollm2, tmp_path):
    write_tasks(tmp_path)
    done = ran("lm-eval", cluster, smollm2.path, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    samples = json.loads(done.stdout.splitlines()[-1])["samples"]
    tokenizer = Tokenizer.from_file(str(Path(smollm2.path) / "tokenizer.json"))
    torch.set_num_threads(1)
    model = load_model(Path(smollm2.path), torch.float32)

    def likelihood(before, text):
        """Return the log probability of `text` after the tokens `before`, and whether it is greedy."""
        token_ids = before + tokenizer.encode(text, add_special_tokens=False).ids
        with torch.inference_mode():
            logprobs = model(torch.tensor([token_ids])).logits[0, len(before) - 1 : -1].log_softmax(-1)
        wanted = torch.tensor(token_ids[len(before) :])
        is_greedy = bool((logprobs.argmax(-1) == wanted).all())
        return logprobs.gather(-1, wanted[:, None]).sum().item(), is_greedy

    for sample, (question, choices) in zip(samples["choices"], QUESTIONS, strict=True):
        before = tokenizer.encode(question, add_special_tokens=False).ids
        for (value, is_greedy), choice in zip(sample["resps"], choices, strict=True):
            expected, greedy = likelihood(before, choice)
            assert value == pytest.approx(expected, abs=1e-4), (question, choice)
            assert is_greedy == greedy
    # A whole text is measured after the token that begins one.
    begin = tokenizer.token_to_id("<|im_start|>")
    for sample, text in zip(samples["texts"], TEXTS, strict=True):
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
        # a sum of float32, computed in chunks that the load decides on
        assert sample["resps"][0] == pytest.approx(likelihood([begin], text)[0], abs=1e-5 * num_tokens)
    assert samples["answers"][0]["resps"] == [" Paris"]
