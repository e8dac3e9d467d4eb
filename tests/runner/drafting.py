"""Engines with drafters on the device, for tests of what must not change: tiny targets, requests that meet chunks of
prompts, prefix hits and other rows, and the proof that the distribution is the target's."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from serving.llm import LLM, RequestOutput, SamplingParams
from serving.request import StructuredOutputs

GOLDENS = Path(__file__).parents[1] / "goldens"
TARGET = GOLDENS / "llama-gqa-tied"
V, D = 128, 40  # of the target
SIZES = dict(max_num_seqs=2, max_num_batched_tokens=16, num_pages=60, block_size=8, dtype="float32", max_model_len=128)
# Chunks of a prompt, decoding rows beside them, prefix hits in a second run, preemptions in a tiny pool.
RNG = np.random.default_rng(0)
SHARED = RNG.integers(3, V, 24).tolist()
PROMPTS = [*([*SHARED, *RNG.integers(3, V, n).tolist()] for n in (1, 9, 30)), *(RNG.integers(3, V, n).tolist()
           for n in (2, 5, 40, 17))]  # fmt: skip
SAMPLING = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=30, ignore_eos=True, top_p=0.9),
    SamplingParams(temperature=0, repetition_penalty=1.2, max_tokens=30, ignore_eos=True),
]


def write(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


@contextmanager
def engine(tokenizer: str, speculative: dict | None, model: Path = TARGET, **options) -> Iterator[LLM]:
    with LLM(str(model), tokenizer=tokenizer, progress=False, check_integrity=True, speculative_config=speculative,
             **(SIZES | options)) as llm:  # fmt: skip
        yield llm
        assert llm.service.engine.stats.compile_misses == 0
        assert llm.service.engine.stats.kv_cache_usage == 0


def run(llm: LLM, prompts: Sequence[list[int]] = PROMPTS, sampling=None) -> list[RequestOutput]:
    given = sampling or [SAMPLING[i % len(SAMPLING)] for i in range(len(prompts))]
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], given, use_tqdm=False)


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def tiny(folder: Path, vocab: int, num_layers: int = 1) -> Path:
    """A target of so many tokens, none of them sure."""
    config = json.loads((TARGET / "config.json").read_text()) | {"vocab_size": vocab, "num_hidden_layers": num_layers}
    kept = tuple(f"model.layers.{layer}." for layer in range(num_layers))
    tensors = {name: tensor for name, tensor in load_file(TARGET / "model.safetensors").items()
               if "layers." not in name or name.startswith(kept)}  # fmt: skip
    tensors["model.embed_tokens.weight"] = 0.3 * tensors["model.embed_tokens.weight"][:vocab]
    write(folder, config, tensors)
    return folder


def check_distribution(speculative: dict, target: Path, vocab: int, tokenizer: str, grammar: str = "",
                       allowed: Sequence[Sequence[int]] = ()) -> None:  # fmt: skip
    """Three tokens after a prompt, against the model's probabilities for each triple, by chi-square. grammar: a regex
    of longer texts; allowed: by it, for each of the three, always more than one token."""
    prompt, draws = [1, 0, 2, 1], 1000
    outputs = StructuredOutputs(regex=grammar) if grammar else None
    with engine(tokenizer, speculative, target, max_model_len=16) as llm:
        one = SamplingParams(temperature=1.0, max_tokens=1, logprobs=vocab, ignore_eos=True)
        first = probabilities(run(llm, [prompt], [one]), vocab)
        second = probabilities(run(llm, [[*prompt, t] for t in range(vocab)], [one] * vocab), vocab)
        pairs = [[*prompt, a, b] for a in range(vocab) for b in range(vocab)]
        third = probabilities(run(llm, pairs, [one] * len(pairs)), vocab)
        # A fourth token, so that the two before it may both be drafts.
        hot = [SamplingParams(temperature=1.0, seed=s, max_tokens=4, ignore_eos=True, structured_outputs=outputs)
               for s in range(draws)]  # fmt: skip
        drawn = np.array(tokens(run(llm, [prompt] * draws, hot)))[:, :3]
        assert llm.service.engine.stats.accepted_tokens > draws / 10
    for place, chances in zip(allowed, (first, second, third), strict=False):
        chances *= np.isin(np.arange(vocab), place)
        chances /= chances.sum(-1, keepdims=True)
    joint = first[0, :, None, None] * second[:, :, None] * third.reshape(vocab, vocab, vocab)
    assert joint.max() < 0.4, "a sure model would prove nothing"
    counts = np.zeros_like(joint)
    np.add.at(counts, tuple(drawn.T), 1)
    assert not counts[joint == 0].any()
    expected = (draws * joint).reshape(-1)
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    found = np.append(counts.reshape(-1)[~rare], counts.reshape(-1)[rare].sum())
    expected, found = expected[expected > 0], found[expected > 0]
    chi_square, degrees = ((found - expected) ** 2 / expected).sum(), len(expected) - 1
    # Wilson and Hilferty 1931: the cube root of chi-square over its degrees is nearly normal. 3.1: one in a thousand.
    normal = ((chi_square / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees))
    assert normal < 3.1, f"chi-square {chi_square:.1f} of {degrees} degrees"


def probabilities(outputs: Sequence[RequestOutput], vocab: int) -> np.ndarray:
    found = np.zeros((len(outputs), vocab))
    for row, output in zip(found, outputs, strict=True):
        [entry] = output.outputs[0].logprobs or [None]
        assert entry is not None and len(entry.top_ids) == vocab
        row[entry.top_ids] = np.exp(entry.top_logprobs)
    return found
