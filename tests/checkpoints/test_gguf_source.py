"""A GGUF read as the Hugging Face model it was made from."""

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints.default_model import default_model_path
from checkpoints.errors import CheckpointError
from checkpoints.gguf_config import ROPE_FACTORS, llama3_divisors, llama3_rule
from checkpoints.gguf_source import GGUFSource, hf_name
from checkpoints.open import open_checkpoint
from quant.gguf_file import GGUFFile

GOLDENS = Path(__file__).parents[1] / "goldens"
MODELS = [("llama-gqa-tied", "llama"), ("llama2-mha", "llama"), ("qwen2-bias", "qwen2"), ("qwen3-qk-norm", "qwen3")]


@pytest.mark.parametrize(("golden", "architecture"), MODELS)
def test_tensors_are_those_of_the_hugging_face_model(tmp_path, write_gguf, golden: str, architecture: str):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", golden, architecture=architecture))
    expected = load_file(GOLDENS / golden / "model.safetensors")
    source = checkpoint.source
    assert source is not None and set(source.names()) == set(expected)
    rng = np.random.default_rng(0)
    for name, tensor in expected.items():
        assert source.shape(name) == tensor.shape
        np.testing.assert_array_equal(source.read(name), tensor)
        index = tuple(slice(*sorted(rng.integers(0, n + 1, 2).tolist())) for n in tensor.shape)
        np.testing.assert_array_equal(source.read(name, index), tensor[index])
    checkpoint.close()


@pytest.mark.parametrize(("golden", "architecture"), MODELS)
def test_config_says_what_config_json_says(tmp_path, write_gguf, golden: str, architecture: str):
    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", golden, architecture=architecture)).config
    expected = json.loads((GOLDENS / golden / "config.json").read_text())
    expected["rope_theta"] = expected.get("rope_theta") or expected["rope_parameters"]["rope_theta"]
    compared = set(config) & set(expected)
    assert len(compared) >= 15
    assert {key: config[key] for key in compared} == {key: expected[key] for key in compared}


def write_tensor(path: Path, name: str, packed: np.ndarray, kind: gguf.GGMLQuantizationType, heads: int = 1) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(heads)
    writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_quantized_rows_are_permuted_back(tmp_path, kind: gguf.GGMLQuantizationType):
    """Whole rows move, so blocks stay whole. Two heads of 4: the file has rows 0 2 1 3 of each."""
    weight = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    packed = gguf.quants.quantize(weight, kind)
    write_tensor(tmp_path / "m.gguf", "blk.0.attn_q.weight", packed[[0, 2, 1, 3, 4, 6, 5, 7]], kind, heads=2)
    source, name = GGUFSource(tmp_path / "m.gguf"), "model.layers.0.self_attn.q_proj.weight"
    values = gguf.quants.dequantize(packed, kind)
    np.testing.assert_array_equal(source.read(name), values)
    np.testing.assert_array_equal(source.read(name, (slice(3, 6), slice(5, 40))), values[3:6, 5:40])


def test_the_default_model():
    """Against the gguf package's own container reader."""
    path = default_model_path()
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert set(ours.tensors) == {t.name for t in theirs.tensors}
    for tensor in theirs.tensors[:12]:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.type_id, info.offset) == (tensor.tensor_type, tensor.data_offset)
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type", "llama.rope.freq_base"):
        assert ours.metadata[key] == theirs.fields[key].contents()
    config = open_checkpoint(path).config
    assert (config["model_type"], config["rms_norm_eps"], config["rope_theta"]) == ("llama", 1e-5, 1e5)
    assert (config["vocab_size"], config["tie_word_embeddings"], config["eos_token_id"]) == (49152, True, 2)


def test_names():
    assert hf_name("blk.11.attn_output.weight") == "model.layers.11.self_attn.o_proj.weight"
    assert hf_name("blk.0.ffn_gate_exps.weight") == "blk.0.ffn_gate_exps.weight"
    assert hf_name("output.weight") == "lm_head.weight"


@pytest.mark.parametrize(("factor", "theta", "head_dim", "original"), [(8, 5e5, 128, 8192), (32, 5e5, 64, 8192),
                                                                       (8, 1e4, 16, 16)])  # fmt: skip
def test_llama3_scaling_is_read_from_its_table(tmp_path, write_gguf, factor, theta, head_dim, original):
    rule = {"rope_type": "llama3", "factor": float(factor), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": original}  # fmt: skip
    table = llama3_divisors(rule, theta, head_dim).astype(np.float32)
    assert llama3_rule(table, theta, head_dim, "x") == rule
    table[head_dim // 4] *= 1.1
    with pytest.raises(CheckpointError, match="does not follow"):
        llama3_rule(table, theta, head_dim, "x")


def test_llama3_table_by_hand():
    """Theta 1e4, head size 4: wavelengths 6.28 and 628, of which a context of 12 has 1.91 and 0.019."""
    rule = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 12}
    blend = (12 / (2 * np.pi) - 1) / 3
    np.testing.assert_allclose(llama3_divisors(rule, 1e4, 4), [1 / (blend + (1 - blend) / 8), 8])


def test_llama3_table_is_no_weight(tmp_path, write_gguf):
    rule = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16}  # fmt: skip
    table = llama3_divisors(rule, 1e4, 16).astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", "llama3-rope", extra=lambda w: w.add_tensor(ROPE_FACTORS, table))
    checkpoint = open_checkpoint(path)
    assert checkpoint.config["rope_scaling"] == rule
    assert checkpoint.source is not None and ROPE_FACTORS not in checkpoint.source.names()


def test_linear_scaling_and_window(tmp_path, write_gguf):
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)
        writer.add_sliding_window(24)

    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama-gqa-tied", extra=extra)).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 24)
    old = write_gguf(tmp_path / "old.gguf", "llama-gqa-tied",
                     extra=lambda writer: writer.add_float32("llama.rope.scale_linear", 4.0))  # fmt: skip
    assert open_checkpoint(old).config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_experts_are_refused_by_name(tmp_path, write_gguf):
    path = write_gguf(tmp_path / "m.gguf", "llama-gqa-tied", extra=lambda writer: writer.add_expert_count(8))
    with pytest.raises(CheckpointError, match="llama.expert_count is 8, mixtures of experts are not supported in GGUF"):
        open_checkpoint(path)


def test_what_cannot_be_read(tmp_path, write_gguf):
    def refused(content: bytes, message: str) -> None:
        path = tmp_path / "bad.gguf"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message) as caught:
            checkpoint = open_checkpoint(path)
            assert checkpoint.source is not None
            checkpoint.source.read("model.norm.weight")
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)

    whole = write_gguf(tmp_path / "m.gguf", "llama-gqa-tied").read_bytes()
    refused(b"", "not a GGUF file")
    refused(b"PK\x03\x04" + whole[4:], "not a GGUF file")
    refused(whole[:100], "damaged or cut short")
    refused(whole[:4] + struct.pack("<I", 1) + whole[8:], "version 1 is not supported")
    refused(whole[:-8], "norm.weight ends at byte .* cut short")
    named = struct.pack("<Q", 5) + b"llama"
    refused(whole.replace(named, named.replace(b"llama", b"gpt99")), "architecture 'gpt99' is not supported")
    refused(whole.replace(b"llama.embedding_length", b"llama.embedding_lengtX"), "no llama.embedding_length")


def test_unsupported_type_names_the_tensor(tmp_path):
    kind = gguf.GGMLQuantizationType.Q2_K
    write_tensor(tmp_path / "m.gguf", "output_norm.weight", np.zeros((1, 84), np.uint8), kind)
    source = GGUFSource(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"m\.gguf: output_norm\.weight: GGUF type Q2_K is not supported"):
        source.read("model.norm.weight")
    source.close()


def test_closing_waits_for_views(tmp_path):
    values = np.arange(64, dtype=np.float32)
    write_tensor(tmp_path / "m.gguf", "output_norm.weight", values, gguf.GGMLQuantizationType.F32)
    file = GGUFFile(tmp_path / "m.gguf")
    rows = file.rows("output_norm.weight")
    file.close()
    np.testing.assert_array_equal(rows.view(np.float32), values)
