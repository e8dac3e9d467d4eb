import json
from pathlib import Path

import pytest

from checkpoints.default_model import default_model_path
from serving.tokenizer.load import load_tokenizer
from serving.tokenizer.tokenizer import Tokenizer

GOLDENS = Path(__file__).parents[1] / "goldens" / "tokenizer"


@pytest.fixture(scope="session")
def golden() -> dict:
    return json.loads((GOLDENS / "smollm2.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    """The default model's tokenizer, byte-level BPE from a GGUF."""
    return load_tokenizer(default_model_path())


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Tokenizer:
    """A tiny SentencePiece BPE with byte fallback, as Llama 2's."""
    folder = tmp_path_factory.mktemp("llama")
    (folder / "tokenizer.model").write_bytes((GOLDENS / "bpe.model").read_bytes())
    return load_tokenizer(folder)
