"""Makes smollm2.json, bpe.model and unigram.model, with `transformers` and `sentencepiece`.

    python tests/goldens/tokenizer/make_tokenizer.py SmolLM2-135M-Instruct.Q4_1.gguf

smollm2.json: varied texts with their ids, ids with their text, and rendered chats. transformers' GGUF reader leaves
out the model's first pre-tokenizer (single digits), which only shows on two or more spaces before a digit; it is put
back here as in the model's own tokenizer.json. `without_digits` counts the texts where that changes the ids.

The two SentencePiece models are trained on the texts below; the tests compare with the library itself.
"""

import json
import random
import sys
from pathlib import Path

import sentencepiece
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

HERE = Path(__file__).parent
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<empty_output>"]
TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "\t",
    "\r\n",
    " \n \n",
    "a",
    " a",
    "a ",
    "  a  ",
    "Hello, world!",
    "The capital of France is",
    "don't can't I'll we've they're it's I'm he'd DON'T",
    "1234567890",
    "3.14159 -2.5e-10 0x1F 1,000,000",
    "a1b2c3",
    "x = 10\n    y =  2  # two\n\n\n\tz",
    "def f(a, b):\n    return a**2 + b[0:3] // {'k': 1}\n",
    "snake_case camelCase",
    "Grüße aus München",
    "naïve café résumé",
    "cafe\u0301 decomposed",
    "你好，世界",
    "こんにちは世界",
    "안녕하세요",
    "Привет мир",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "😀😃😄",
    "👨‍👩‍👧‍👦 family",
    "🇫🇷 🇩🇪",
    "👍🏽",
    "∑ ∫ √2 ≠ π",
    "½ ² ³ ⅷ ①",
    "١٢٣ ４５６",
    "a\u00a0b\u2003c\u200bd",
    "\ufeffbom",
    "nul\x00byte",
    "bell\x07",
    "\u2028line\u2029para",
    "\U0001d4d0\U0001d4d1 math letters",
    "zalgo h̷̛͝e̵",
    "....!!!???",
    "---===***",
    "<html><body>&amp;</body></html>",
    '{"a": [1, 2.0, null, true], "b": "\\u00e9"}',
    "https://example.com/path?q=1&r=%20#frag",
    "user@example.com",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "          ten spaces",
    "word" * 20,
    "\n\n\n\n\n\nlines",
    "<|im_start|>user\nHi<|im_end|>\n",
    "a<|im_end|>b",
    " <|im_end|> ",
    "<|im_end|><|im_end|>",
    "<|im_start",
    "|im_end|>",
    "<|IM_END|>",
    "<repo_name>x<file_sep>y",
    "<|endoftext|>",
    "tail<|endoftext|>",
    "< |im_end| >",
]
ALPHABETS = [
    "abcdefghij  \n", "0123456789 .,-", "aA1 \t\n!?'\"", "éüßñçøå ", "漢字仮名交じり文。", "😀🎉🚀👍🏽\u200d ",
    "абвгд ё", "(){}[];:=+-*/<>_\n    ", "\u0300\u0301ae o\u0308", "  \n\n\t\t", "".join(map(chr, range(0x20, 0x180))),
    "".join(map(chr, range(0x600, 0x700))), "".join(map(chr, range(0x1F600, 0x1F680))),
]  # fmt: skip
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": " <c> & 'd' "},
    ],
]
CORPUS = [
    "The lighthouse keeper climbed the hundred and forty steps to the lamp room and polished the great lens.",
    "Every morning he wrote the weather into a leather book, and gave each passing ship a name of his own.",
    "In the winter of the twelfth year a storm came from the north that was unlike any storm before it.",
    "def area(width, height):\n    return width * height  # in square metres",
    "Liebe Grüße aus München! Fünf hübsche Mädchen aßen süßes Gebäck.",
    "numbers: 1 12 123 1234 12345, 3.14 and 2.71; and  two  spaces   or three",
]


def texts() -> list[str]:
    rng = random.Random(0)
    mixed = ["".join(rng.choices(rng.choice(ALPHABETS), k=rng.randint(1, 40))) for _ in range(150)]
    joined = [" ".join(rng.sample(TEXTS, 3)) + rng.choice(SPECIAL) for _ in range(60)]
    return TEXTS + mixed + joined


def smollm2(gguf: Path) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    plain = [tokenizer.encode(text) for text in texts()]
    backend = tokenizer.backend_tokenizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    encoded = [{"text": text, "ids": tokenizer.encode(text)} for text in texts()]
    rng = random.Random(1)
    random_ids = [rng.sample(range(tokenizer.vocab_size), 12) for _ in range(40)]
    return {
        "versions": {"transformers": transformers.__version__, "sentencepiece": sentencepiece.__version__},
        "without_digits": sum(a != b["ids"] for a, b in zip(plain, encoded, strict=True)),
        "encoded": encoded,
        "decoded": [
            {"ids": ids, "text": tokenizer.decode(ids), "visible": tokenizer.decode(ids, skip_special_tokens=True)}
            for ids in random_ids
        ],
        "chats": [
            {
                "messages": chat,
                "prompt": tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
                "bare": tokenizer.apply_chat_template(chat, tokenize=False),
            }
            for chat in CHATS
        ],
    }


def train(name: str, **options) -> None:
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(CORPUS * 4), model_prefix=str(HERE / name), character_coverage=1.0,
        bos_id=1, eos_id=2, unk_id=0, pad_id=-1, minloglevel=2, **options
    )  # fmt: skip
    (HERE / f"{name}.vocab").unlink()


def main() -> None:
    golden = smollm2(Path(sys.argv[1]))
    (HERE / "smollm2.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n", encoding="utf-8")
    # As Llama 2: bytes for what is unknown, no normalization, every space counts.
    train("bpe", model_type="bpe", vocab_size=480, byte_fallback=True, normalization_rule_name="identity",
          remove_extra_whitespaces=False, split_digits=True, user_defined_symbols=["<think>"])  # fmt: skip
    # As T5 and others: spaces collapsed, letters mapped, unknown characters lost.
    rules = HERE / "rules.tsv"
    rules.write_text("FF21\t41\nFB01\t66 69\n")  # fullwidth A to A, the fi ligature to f i
    train("unigram", model_type="unigram", vocab_size=120, normalization_rule_tsv=str(rules))
    rules.unlink()


if __name__ == "__main__":
    main()
