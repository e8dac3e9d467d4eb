"""Whatever is wrong with a model's files, it is told as one of the errors that name the file, never as another."""

import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from checkpoints.errors import CheckpointError
from checkpoints.open import open_checkpoint
from checkpoints.safetensors_source import INDEX
from model.families.common import UnsupportedModel
from model.families.registry import read_config
from serving.errors import ConfigError
from serving.tokenizer.load import load_tokenizer

GOLDEN = Path(__file__).parents[1] / "goldens" / "llama-gqa-tied"
CONFIG = json.loads((GOLDEN / "config.json").read_text())
DAMAGED = (CheckpointError, UnsupportedModel)
NONSENSE = (None, 0, -1, "x", "", [], [1], {}, 1.5, True, 10**12, float("inf"), float("nan"))


def read_all(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    read_config(checkpoint.config)
    assert checkpoint.source is not None
    for name in checkpoint.source.names():
        checkpoint.source.read(name)
    checkpoint.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "model"))


@pytest.mark.parametrize("key", CONFIG)
def test_config_values(folder: Path, key: str):
    for value in NONSENSE:
        (folder / "config.json").write_text(json.dumps(CONFIG | {key: value}))
        try:
            read_all(folder)
        except DAMAGED as error:
            assert "config.json" in str(error)


@pytest.mark.parametrize("key, value, message", [
    ("num_attention_heads", 0, "division|at least 1"), ("num_key_value_heads", -2, "num_kv_heads=-2 must be at least"),
    ("head_dim", 0, "head_dim=0 must be at least 1"), ("num_hidden_layers", 10**12, "must be in 1 to 10000"),
    ("num_hidden_layers", 0, "must be in 1 to 10000"), ("model_type", ["llama"], "is not supported"),
    ("rope_scaling", {"rope_type": "linear", "factor": "x"}, "factor='x' .* must be a number"),
])  # fmt: skip
def test_impossible_models(key: str, value: Any, message: str):
    with pytest.raises(UnsupportedModel, match=message):
        read_config(CONFIG | {key: value})


def test_a_window_of_nothing():
    mistral = {key: value for key, value in CONFIG.items() if key not in ("attention_bias", "mlp_bias")}
    with pytest.raises(UnsupportedModel, match="must be at least 1"):
        read_config(mistral | {"model_type": "mistral", "sliding_window": 0})


def test_json_that_is_too_deep(folder: Path):
    deep = "[" * 100_000
    (folder / INDEX).write_text(deep)
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        read_all(folder)
    (folder / "config.json").write_text(deep)
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read as JSON"):
        read_all(folder)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "a" * 5000])
def test_an_index_names_files_of_its_folder(folder: Path, name: str):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(CheckpointError, match="outside of the folder|not there"):
        read_all(folder)


@pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets", None])
def test_safetensors_entries(folder: Path, field: str | None):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    name = "model.norm.weight"
    begin, end = json.loads(whole[8:size])[name]["data_offsets"]
    values = [*NONSENSE, [-8, -8], ["a", "b"], [1, 2, 3], [2**70, 2**70], [10, 0], [begin - end - 8, -8]]
    for value in values:
        header = json.loads(whole[8:size])
        if field is None:
            header[name] = value
        else:
            header[name][field] = value
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + whole[size:])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            read_all(folder)


@pytest.mark.parametrize("header", [b"[]", b"1", b'"x"', b"null", b"[" * 50_000])
def test_safetensors_headers(folder: Path, header: bytes):
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_all(folder)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def gguf(*fields: bytes, tensors: int = 0, rest: bytes = b"") -> bytes:
    llama = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, 1 + len(fields)) + llama + b"".join(fields) + rest + bytes(64)


def number(key: bytes, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


HEADS = b"llama.attention.head_count"


@pytest.mark.parametrize("content, message", [
    (gguf(number(b"general.alignment", 0)), "general.alignment is 0"),
    (gguf(text(b"general.alignment") + struct.pack("<I", 8) + text(b"x")), "general.alignment is 'x'"),
    (gguf(text(b"x") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000), "damaged or cut short"),
    (gguf(text(b"x") + struct.pack("<IIQ", 9, 0, 1 << 60)), "damaged or cut short"),
    (gguf(text(b"x") + struct.pack("<IIQ", 9, 8, 1 << 63)), "damaged or cut short"),
    (gguf(tensors=1 << 63), "axes|damaged"),
    (gguf(tensors=1, rest=text(b"token_embd.weight") + struct.pack("<IIQ", 0, 0, 0)), "0 axes, must have 1 to 4"),
    (gguf(tensors=1, rest=text(b"x") + struct.pack("<I", 1 << 31)), "axes, must have 1 to 4"),
    (gguf(), "the metadata has no llama.attention.head_count"),
    (gguf(number(HEADS, 0)), "head_count is 0, only one whole number above 0"),
    (gguf(text(HEADS) + struct.pack("<IIQII", 9, 4, 2, 8, 8)), r"head_count is \[8, 8\], only one whole number"),
    (gguf(number(HEADS, 4), number(b"llama.embedding_length", 16)), "no llama.feed_forward_length"),
], ids=range(12))  # fmt: skip
def test_gguf_headers(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_all(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match=r"m\.gguf"):
        load_tokenizer(tmp_path / "m.gguf")


def test_gguf_with_random_damage(tmp_path: Path, write_gguf):
    def tokenizer(writer) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b", "<e>", "ab"])
        writer.add_token_types([1, 1, 3, 1])
        writer.add_token_merges(["a b"])

    path = write_gguf(tmp_path / "m.gguf", "llama-gqa-tied", extra=tokenizer)
    whole, rng, refused = path.read_bytes(), random.Random(0), 0
    header = whole.index(b"ffn_down")
    load_tokenizer(path)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(4, header)] = rng.choice([0, 1, 8, 9, 255, rng.randrange(256)])
        path.write_bytes(damaged[: rng.randrange(header)] if rng.random() < 0.2 else damaged)
        try:
            read_all(path)
        except DAMAGED:
            refused += 1
        try:
            load_tokenizer(path)
        except ConfigError as error:
            assert "m.gguf" in str(error)
    assert refused > 100
