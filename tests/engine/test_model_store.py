"""A reference becomes a folder that loads, or one line that says what is missing."""

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from base.errors import ConfigError
from engine.model_store import main, prepare
from engine.weights import convert_gguf, load_model

NOBODY = 65534
VOCABULARY = ["a", "b", "ab", "aba", *(f"t{index}" for index in range(60))]

GEMMA_NORMS = {f"blk.0.post_{name}_norm.weight": (32,) for name in ("attention", "ffw")}


def heard(_line: str) -> None:
    """Progress that nobody reads."""


def folder_with_model(path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def write_gguf(
    path: Path,
    seed: int = 0,
    left_out: str = "",
    more: dict[str, tuple[int, ...]] | None = None,
    family: str = "llama",
    **keys: float | str,
) -> Path:
    """A llama of one layer, as llama.cpp would write it: but for a tensor, and with `more` of such shapes.

    `keys` are metadata of the family: two underscores are a dot."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), family)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([1] * 64)
    writer.add_token_merges(["a b", "ab a"])  # transformers 5.17 reads a list of one as no list
    for token in ("bos", "eos", "pad", "unk"):
        getattr(writer, f"add_{token}_token_id")(0)
    shapes = {"token_embd": (64, 32), "output": (64, 32), "output_norm": (32,)}
    block = {
        "attn_norm": (32,),
        "ffn_norm": (32,),
        "ffn_gate": (48, 32),
        "ffn_up": (48, 32),
        "ffn_down": (32, 48),
    }
    block |= {f"attn_{name}": (32, 32) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.{name}": shape for name, shape in block.items()}
    shapes = {f"{name}.weight": shape for name, shape in shapes.items() if name.split(".")[-1] != left_out}
    for name, shape in (shapes | (more or {})).items():
        writer.add_tensor(name, rng.normal(size=shape).astype(np.float32))
    for name, value in keys.items():
        add: Any = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{family}.{name.replace('__', '.')}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_folder_is_used_where_it_is(tmp_path: Path) -> None:
    folder = folder_with_model(tmp_path / "tiny")
    prepared = prepare(str(folder), tmp_path / "cache", heard)
    assert (prepared.path, prepared.name) == (str(folder), "tiny")
    assert load_model(Path(prepared.path), torch.float32).config.vocab_size == 64


def test_the_id_of_a_model_is_its_content(tmp_path: Path) -> None:
    first = folder_with_model(tmp_path / "a")
    ids = [prepare(str(first), tmp_path / "cache", heard).model_id for _ in range(2)]
    moved = first.rename(tmp_path / "b")
    ids.append(prepare(str(moved), tmp_path / "cache", heard).model_id)
    assert len(set(ids)) == 1
    LlamaForCausalLM.from_pretrained(moved).to(torch.float16).save_pretrained(moved)
    assert prepare(str(moved), tmp_path / "cache", heard).model_id not in ids


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_what_a_folder_lacks_is_named(tmp_path: Path, missing: str) -> None:
    folder = folder_with_model(tmp_path / "tiny")
    (folder / missing).rename(tmp_path / "elsewhere")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(ConfigError, match=missing.replace("model.", r"\*.")):
        prepare(str(folder), tmp_path / "cache", heard)


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    folder = folder_with_model(tmp_path / "tiny")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing, the first is model\.layers\.0\.mlp\.up_proj\.weight"):
        load_model(folder, torch.float32)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    folder = folder_with_model(tmp_path / "tiny")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(700)
    with pytest.raises(ConfigError, match="tiny: the model cannot be loaded"):
        load_model(folder, torch.float32)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({"weight_map": {"a": "a.bin"}}, "a.bin"),
        ({"weight_map": {"a": "../tiny/model.safetensors"}}, "same folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "same folder"),
        ({"weight_map": {"a": 5}}, "same folder"),
        ({"weight_map": {"a": "other.safetensors"}}, "other.safetensors is missing"),
        ({"weight_map": {}}, "weight_map is wanted"),
        ({"weight_map": {"a": "model-1.safetensors"}}, "metadata is wanted"),
        ([], "JSON object is wanted"),
        ("{", "Expecting"),
    ],
)
def test_an_index_of_weights_that_are_not_the_folders_own_is_refused(tmp_path: Path, index, reason) -> None:
    folder = folder_with_model(tmp_path / "tiny")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "a.bin").write_bytes(b"pickled")
    (folder / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    for refused in (
        lambda: prepare(str(folder), tmp_path / "cache", heard),
        lambda: load_model(folder, torch.float32),
    ):
        with pytest.raises(ConfigError, match=reason):
            refused()


def test_indices_and_files_that_are_not_read_are_nobodys_business(tmp_path: Path) -> None:
    folder = folder_with_model(tmp_path / "tiny")
    for name in ("pytorch_model.bin.index.json", INDEX):
        (folder / name).write_text(json.dumps({"weight_map": {"a": "pytorch_model-1.bin"}}))
    save_file({"layers.9.w.weight": torch.zeros(2, dtype=torch.int8)}, folder / "consolidated.safetensors")
    prepare(str(folder), tmp_path / "cache", heard)
    assert load_model(folder, torch.float32).config.num_hidden_layers == 1
    weights = folder / "model.safetensors"
    names = dict.fromkeys(load_file(weights), "model-1.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))
    weights.rename(folder / "model-1.safetensors")
    assert load_model(folder, torch.float32).config.num_hidden_layers == 1


@pytest.mark.parametrize("name", ["adapter_model.bin", "sub/x.safetensors.index.json", "sub/o.safetensors"])
def test_weights_that_a_configuration_has_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    folder = folder_with_model(tmp_path / "tiny")
    edited(folder, transformers_weights=name)
    for refused in (
        lambda: prepare(str(folder), tmp_path / "cache", heard),
        lambda: load_model(folder, torch.float32),
    ):
        with pytest.raises(ConfigError, match="transformers_weights"):
            refused()


@pytest.mark.parametrize("kind", ["a pipe", "a link to nothing", "a folder"])
def test_what_is_no_file_is_not_read(tmp_path: Path, kind: str) -> None:
    folder = folder_with_model(tmp_path / "tiny")
    extra = folder / "extra.json"
    if kind == "a pipe":
        os.mkfifo(extra)
    elif kind == "a folder":
        extra.mkdir()
    else:
        extra.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"extra\.json: it is no file"):
        prepare(str(folder), tmp_path / "cache", heard)


def edited(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10_000),
        ("num_hidden_layers", "2"),
        ("num_hidden_layers", None),
        ("hidden_size", 33),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 0),
        ("model_type", []),
        ("dtype", "float99"),
        ("text_config", 5),
        ("quantization_config", 5),
        ("rope_parameters", "a"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_in_a_line(tmp_path: Path, field: str, value) -> None:
    folder = folder_with_model(tmp_path / "tiny")
    edited(folder, **{field: value})
    with pytest.raises(ConfigError) as refused:
        load_model(folder, torch.float32)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bool])
def test_weights_of_few_bits_without_a_configuration_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = folder_with_model(tmp_path / "tiny")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].to(dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"{name} is .*quantization_config"):
        load_model(folder, torch.float32)


@pytest.mark.parametrize("reference", ["./nowhere", "/no/such", "nowhere.gguf", "unknown"])
def test_a_reference_to_nothing_is_refused(tmp_path: Path, reference: str) -> None:
    with pytest.raises(ConfigError, match=r"no such"):
        prepare(reference, tmp_path / "cache", heard)


@pytest.mark.parametrize(
    "rest",
    [
        bytes(100),
        b"",
        struct.pack("<IQQ", 3, 0, 2**63 - 1),
        struct.pack("<IQQQ", 3, 0, 1, 2**63 - 1),
    ],
    ids=["zeros", "cut after its mark", "keys that are not there", "a key as long as memory"],
)
def test_a_damaged_gguf_file_is_refused(tmp_path: Path, rest: bytes) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + rest)
    with pytest.raises(ConfigError, match=r"broken\.gguf: the GGUF file cannot be read"):
        convert_gguf(broken, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_weights_that_a_gguf_file_lacks_are_not_made_up(tmp_path: Path) -> None:
    """Each conversion would draw others, and two nodes take them for one model."""
    source = write_gguf(tmp_path / "tiny.gguf", left_out="ffn_up")
    with pytest.raises(ConfigError, match=r"1 weights are missing, the first is .*mlp\.up_proj\.weight"):
        convert_gguf(source, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"more": {"rope_freqs.weight": (8,)}}, "have 12904 numbers, of which llama takes 12896"),
        ({"more": {"blk.0.attn_q.bias": (32,)}}, "have 12928 numbers, of which llama takes 12896"),
        ({"rope__scaling__factor": 8.0}, r"llama\.rope\.scaling\.factor is 8\.0, which is not read"),
        ({"rope__scale_linear": 4.0}, r"llama\.rope\.scale_linear is 4\.0, which is not read"),
        (
            {"family": "gemma2", "left_out": "output", "more": GEMMA_NORMS, "attention__key_length": 16},
            "how attention is scaled is in no such file",
        ),
        ({"attention__sliding_window": 24}, r"attention\.sliding_window is 24, which is not read"),
        ({"attention__sliding_window": "wide"}, r"tiny\.gguf: the GGUF file cannot be read"),
    ],
    ids=[
        "scaled frequencies",
        "a bias",
        "scaled positions",
        "as they once were scaled",
        "another scale",
        "a window",
        "a window that is no number",
    ],
)
def test_what_would_be_left_out_of_a_gguf_file_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", **changes)
    with pytest.raises(ConfigError, match=reason):
        convert_gguf(source, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_keys_of_a_gguf_file_that_change_nothing_are_left_out(tmp_path: Path) -> None:
    keys = {"rope__scaling__factor": 1.0, "attention__sliding_window": 128, "attention__key_length": 16}
    convert_gguf(write_gguf(tmp_path / "tiny.gguf", **keys), tmp_path / "model")
    assert load_model(tmp_path / "model", torch.float32).config.max_position_embeddings == 128


@pytest.mark.full
def test_two_processes_that_prepare_one_gguf_file_get_one_whole_folder(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    command = [
        sys.executable,
        "-m",
        "engine.model_store",
        str(source),
        "--cache-dir",
        str(tmp_path / "cache"),
    ]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    outputs = [process.communicate(timeout=100) for process in processes]
    prepared = [json.loads(stdout) for stdout, _ in outputs]
    assert prepared[0] == prepared[1]
    assert sum(b"converting" in stderr for _, stderr in outputs) == 1
    model = load_model(Path(prepared[0]["path"]), torch.float32)
    reader = gguf.GGUFReader(source)
    (embedding,) = (tensor.data for tensor in reader.tensors if tensor.name == "token_embd.weight")
    assert torch.equal(model.model.embed_tokens.weight, torch.tensor(np.array(embedding)).view(64, 32))


@contextmanager
def as_nobody(folder: Path) -> Iterator[Path]:
    """A copy that may be read and not written: root, who writes everywhere, is somebody else meanwhile."""
    is_root = os.geteuid() == 0
    with TemporaryDirectory() as above:
        shared = Path(shutil.copytree(folder, Path(above, "shared")))
        for each in (Path(above), *shared.rglob("*"), shared):
            each.chmod(0o555 if each.is_dir() else 0o666)
        if is_root:
            os.seteuid(NOBODY)
        try:
            yield shared
        finally:
            if is_root:
                os.seteuid(0)
            Path(above).chmod(0o700)
            shared.chmod(0o700)


def test_a_cache_that_cannot_be_written_is_named_though_its_lock_can(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    (tmp_path / "tiny.gguf").touch()
    with (
        as_nobody(tmp_path) as cache,
        pytest.raises(ConfigError, match=rf"^cache_dir: .*Permission denied: '{cache}/.*; name a folder"),
    ):
        prepare(str(cache / "tiny.gguf"), cache, heard)


def test_a_model_is_found_where_its_digest_cannot_be_kept(tmp_path: Path) -> None:
    folder_with_model(tmp_path / "model")
    expected = prepare(str(tmp_path / "model"), tmp_path / "cache", heard)
    with as_nobody(tmp_path / "model") as folder:
        assert prepare(str(folder), folder, heard).model_id == expected.model_id


def test_the_command_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "engine.model_store",
        str(tmp_path),
        "--cache-dir",
        str(tmp_path / "cache"),
    ]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert finished.stderr == f"{tmp_path}: config.json is missing\n"


def test_the_command_says_what_it_is_for(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["model_store", "-h"])
    with pytest.raises(SystemExit):
        main()
    assert "Print the folder, id and name of a model as JSON." in capsys.readouterr().out
