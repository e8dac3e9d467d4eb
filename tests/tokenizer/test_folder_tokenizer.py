"""Tokenizers of model folders: tokenizer.json and tokenizer.model, and the files around them."""

import json
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from serving.errors import ConfigError
from serving.tokenizer.load import load_tokenizer
from serving.tokenizer.sentencepiece import build, read_model
from serving.tokenizer.tokenizer import Tokenizer

GOLDENS = Path(__file__).parents[1] / "goldens" / "tokenizer"

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0<"), max_size=40)
WORDS = st.text(alphabet="the lamp storm  ü12\n\tﬁＡ", max_size=60)


@pytest.mark.parametrize("name", ["bpe", "unigram"])
@given(text=TEXT | WORDS)
@example(text="2ooo")
def test_ids_are_those_of_sentencepiece(name: str, text: str):
    """Of unigram pieces with the same sum of scores, "oo" + "o" and "o" + "oo", either order will do."""
    ours, library = ENGINES[name]
    got, want = ours.encode(text, add_special_tokens=False).ids, library.encode(text)
    if name == "unigram" and got != want:
        assert sorted(got) == sorted(want) and library.decode(got) == library.decode(want)
        return
    assert got == want


ENGINES = {
    name: (build(read_model(GOLDENS / f"{name}.model")[0]), sentencepiece.SentencePieceProcessor(
        str(GOLDENS / f"{name}.model"))) for name in ("bpe", "unigram")
}  # fmt: skip


def test_special_tokens_of_a_sentencepiece_folder(llama: Tokenizer):
    assert (llama.bos_id, llama.eos_ids) == (1, (2,))
    assert llama.special_ids == {0, 1, 2}
    think = llama.backend.token_to_id("<think>")
    assert think in llama.encode("a<think>b") and not llama.is_special(think)
    assert llama.encode("the", add_special_tokens=False) == llama.encode("the")[1:]
    assert llama.encode("the")[0] == 1


def test_added_tokens_of_a_sentencepiece_folder(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((GOLDENS / "bpe.model").read_bytes())
    config = {
        "added_tokens_decoder": {"480": {"content": "<|end|>", "special": True}, "481": {"content": "<tool>"}},
        "eos_token": {"content": "<|end|>"},
        "add_bos_token": False,
        "chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [480, 2]}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("<|end|>") == [480]
    assert (tokenizer.eos_ids, tokenizer.vocab_size) == ((480, 2), 482)
    assert tokenizer.is_special(480) and not tokenizer.is_special(481)
    message = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(message) == "D"
    assert tokenizer.apply_chat_template(message, tools=[{"type": "function"}]) == "T"
    assert set(tokenizer.tokenizer_files()) == {
        "tokenizer.model", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}  # fmt: skip

    config["added_tokens_decoder"] = {"490": {"content": "<gap>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="added token '<gap>' has id 490, but 480"):
        load_tokenizer(tmp_path)


def test_template_file_and_config_eos(tmp_path, smollm2: Tokenizer):
    (tmp_path / "tokenizer.json").write_text(smollm2.backend.to_str())
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    (tmp_path / "chat_template.jinja").write_text("new {{ messages[0]['content'] }}")
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "new x"
    assert (tokenizer.eos_ids, tokenizer.bos_id) == ((7,), None)
    assert load_tokenizer(tmp_path / "tokenizer.json").eos_ids == (7,)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer.json or tokenizer.model"),
        ({"tokenizer.json": "{}"}, "tokenizer.json: cannot be read"),
        ({"tokenizer.model": "hello"}, "not a SentencePiece model"),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json: cannot be read as JSON"),
        ({"tokenizer_config.json": "[]"}, "holds a list, expected an object"),
    ],
)
def test_broken_folders(tmp_path, files: dict[str, str], message: str):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path)


def test_other_decoders_are_refused(tmp_path):
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="decodes with WordPiece"):
        load_tokenizer(tmp_path)
