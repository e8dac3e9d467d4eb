"""Ids, text, chats and special tokens of GGUF tokenizers: byte-level against transformers, llama kind against
sentencepiece."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from serving.errors import ConfigError, InvalidRequest
from serving.tokenizer.gguf import SPLITS, from_metadata
from serving.tokenizer.load import load_tokenizer
from serving.tokenizer.tokenizer import Tokenizer

GOLDENS = Path(__file__).parents[1] / "goldens" / "tokenizer"


def test_ids_are_those_of_transformers(smollm2: Tokenizer, golden: dict):
    assert len(golden["encoded"]) > 250
    for case in golden["encoded"]:
        assert smollm2.encode(case["text"]) == case["ids"], case["text"]


def test_text_is_that_of_transformers(smollm2: Tokenizer, golden: dict):
    for case in golden["decoded"]:
        assert smollm2.decode(case["ids"], skip_special_tokens=False) == case["text"]
        assert smollm2.decode(case["ids"]) == case["visible"]


def test_encoding_round_trips(smollm2: Tokenizer, golden: dict):
    for case in golden["encoded"]:
        assert smollm2.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_chats_are_those_of_transformers(smollm2: Tokenizer, golden: dict):
    for case in golden["chats"]:
        assert smollm2.apply_chat_template(case["messages"]) == case["prompt"]
        assert smollm2.apply_chat_template(case["messages"], add_generation_prompt=False) == case["bare"]


def test_special_tokens(smollm2: Tokenizer):
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_ids) == (49152, 1, (2,))
    assert smollm2.is_special(2) and not smollm2.is_special(17)
    assert len(smollm2.special_ids) == 17
    assert smollm2.encode("<|im_end|>") == [2]
    assert smollm2.decode([2, 28120, 2]) == smollm2.decode([28120])
    assert smollm2.decode([2], skip_special_tokens=False) == smollm2.token_text(2) == "<|im_end|>"


def test_ids_without_a_token_are_empty(smollm2: Tokenizer):
    assert [smollm2.token_bytes(i) for i in (49152, -1, 1 << 63)] == [b""] * 3
    assert smollm2.decode([49152, 504]) == "The"


def test_half_a_surrogate_pair_is_refused(smollm2: Tokenizer):
    with pytest.raises(InvalidRequest, match="surrogate"):
        smollm2.encode("\ud83d")


def test_files_make_the_same_tokenizer(smollm2: Tokenizer, golden: dict, tmp_path):
    for name, content in smollm2.tokenizer_files().items():
        (tmp_path / name).write_bytes(content)
    again = load_tokenizer(tmp_path)
    assert (again.bos_id, again.eos_ids, again.special_ids) == (smollm2.bos_id, smollm2.eos_ids, smollm2.special_ids)
    assert again.chat_template == smollm2.chat_template
    assert again.special_tokens == smollm2.special_tokens
    for case in golden["encoded"]:
        assert again.encode(case["text"]) == case["ids"]
    assert again.tokenizer_files() == smollm2.tokenizer_files()


def write_llama_gguf(path, **changes) -> None:
    """The tiny SentencePiece model as llama.cpp's converter stores one."""
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString((GOLDENS / "bpe.model").read_bytes())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(changes.get("kind", "llama"))
    writer.add_token_list([p.piece for p in model.pieces])
    writer.add_token_scores([p.score for p in model.pieces])
    writer.add_token_types([p.type for p in model.pieces])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if "add_bos" in changes:
        writer.add_add_bos_token(changes["add_bos"])
    writer.add_chat_template("{{ bos_token }}[INST] {{ messages[0]['content'] }} [/INST]")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_a_long_text_leaves_other_threads_alone(smollm2: Tokenizer):
    text, turns = "What a wonderful world this is! " * 40_000, 0
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(smollm2.encode, text)
        while not work.done():
            time.sleep(0.001)
            turns += 1
    assert turns > 20, "this thread hardly ran"
    assert len(work.result()) == 40_000 * 7 + 1


def test_llama_kind_ids_are_those_of_sentencepiece(tmp_path, golden: dict):
    write_llama_gguf(tmp_path / "tiny.gguf")
    tokenizer = load_tokenizer(tmp_path / "tiny.gguf")
    library = sentencepiece.SentencePieceProcessor(str(GOLDENS / "bpe.model"))
    for case in golden["encoded"]:
        if "\0" in case["text"]:  # the library stops there
            continue
        ids = tokenizer.encode(case["text"])
        assert ids == [1, *library.encode(case["text"])]
        assert tokenizer.decode(ids) == case["text"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "<s>[INST] x [/INST]"
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
    assert tokenizer.encode("a</s>")[-1] == 2


def test_bos_is_added_only_where_the_file_says(tmp_path):
    write_llama_gguf(tmp_path / "tiny.gguf", add_bos=False)
    assert 1 not in load_tokenizer(tmp_path / "tiny.gguf").encode("the lamp")


def byte_level_metadata(pre: str) -> dict:
    letters = [chr(c) for c in range(0x21, 0x7F)] + ["Ġ", "Ċ", "ĠĠ", "12", "123", "ĠĠĠ"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*letters, "<s>", "</s>"],
        "tokenizer.ggml.token_type": [1] * len(letters) + [3, 3],
        "tokenizer.ggml.merges": ["Ġ Ġ", "1 2", "12 3", "ĠĠ Ġ"],
        "tokenizer.ggml.bos_token_id": len(letters),
        "tokenizer.ggml.eos_token_id": len(letters) + 1,
    }


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["<s>", "x", " ", "123", "4"]),
        ("qwen2", ["x", " ", "1", "2", "3", "4"]),
        ("gpt-2", ["x", " ", "123", "4"]),
        ("smollm", ["x", " ", "1", "2", "3", "4"]),
    ],
)
def test_pre_tokenizers_cut_digits_as_the_models_do(pre: str, pieces: list[str]):
    tokenizer = from_metadata(byte_level_metadata(pre))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("x 1234")] == pieces


def test_qwen2_normalizes_and_ends_at_several_ids():
    metadata = byte_level_metadata("qwen2")
    end = metadata["tokenizer.ggml.eos_token_id"]
    tokenizer = from_metadata({**metadata, "tokenizer.ggml.eot_token_id": end - 1, "tokenizer.ggml.eom_token_id": end})
    assert tokenizer.eos_ids == (end, end - 1)
    assert tokenizer.backend.normalizer is not None
    assert tokenizer.backend.normalizer.normalize_str("e\u0301") == "\u00e9"


def test_unknown_kinds_are_named(tmp_path):
    write_llama_gguf(tmp_path / "t5.gguf", kind="t5")
    with pytest.raises(ConfigError, match=r"t5\.gguf: tokenizer kind 't5' is not supported .*gpt2, llama"):
        load_tokenizer(tmp_path / "t5.gguf")
    with pytest.raises(ConfigError, match="pre-tokenizer 'poro' is not supported .*qwen2"):
        from_metadata(byte_level_metadata("poro"))
    assert "tekken" in SPLITS


def test_a_file_without_a_tokenizer(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"bare\.gguf: the metadata has no 'tokenizer.ggml.model'"):
        load_tokenizer(tmp_path / "bare.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        load_tokenizer(tmp_path / "text.gguf")
    with pytest.raises(ConfigError, match="no such file"):
        load_tokenizer(tmp_path / "missing.gguf")
