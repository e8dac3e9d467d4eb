"""Engines in which everything happens at once: prompts come in chunks, the pool is too small for all, prefixes are
shared, rows with grammars wait for the host beside rows that do not; with each drafter, on one device and on four."""

import gc
import json
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from checkpoints.default_model import default_model_path
from serving.llm import LLM, RequestOutput, SamplingParams
from tests.e2e.tiny_model import CONFIG, DIM, FFN, HEAD_DIM, HEADS, KV_HEADS, tensors, write_tiny_model
from tests.model.speculators import write_with_mtp

DRAFTS = 4
VOCAB = 4096  # the first tokens of the default model's: letters, and what is frequent
ROOMY = dict(max_num_seqs=2, max_num_batched_tokens=128, num_pages=400, enable_prefix_caching=False)
TIGHT = dict(max_num_seqs=4, max_num_batched_tokens=24, num_pages=14, long_prefill_token_threshold=16)
ON_A_MESH = TIGHT | dict(max_num_seqs=2, num_pages=11)  # of each data group; fewer shapes to compile


@dataclass
class Outcome:
    """outputs: of every request, twice: of a cold and of a warm prefix cache. facts: what happened meanwhile."""

    outputs: list[list[RequestOutput]] = field(default_factory=list)
    facts: Counter = field(default_factory=Counter)


def run(target: Path, requests: list[tuple[list[int], SamplingParams]], **options: Any) -> Outcome:
    outcome = Outcome()
    with LLM(str(target), tokenizer=str(default_model_path()), progress=False, check_integrity=True, dtype="float32",
             max_model_len=80, block_size=8, **options) as llm:  # fmt: skip
        watch_overlap(llm, outcome.facts)
        for _ in range(2):
            prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
            outcome.outputs.append(llm.generate(prompts, [sampling for _, sampling in requests], use_tqdm=False))
        stats = llm.service.engine.stats
        assert stats.compile_misses == 0 and stats.kv_cache_usage == 0
    outcome.facts.update(preemption=stats.num_preemptions, forced=stats.forced_tokens, drafts=stats.draft_tokens,
                         accepted=stats.accepted_tokens, cached=stats.prompt_tokens_cached)  # fmt: skip
    del llm
    gc.collect()
    jax.clear_caches()  # of many engines, a process would grow
    return outcome


def watch_overlap(llm: LLM, facts: Counter) -> None:
    """Counts the steps that are dispatched before the one before was read, and rows of prompts' chunks."""
    runner = llm.service.engine._core._runner  # type: ignore[attr-defined]
    dispatch, fetch, in_flight = runner.dispatch, runner.fetch, set()

    def watched(plan: Any) -> Any:
        facts["overlapped"] += bool(in_flight)
        facts["chunks"] += sum(not row.samples for row in plan.rows)
        in_flight.add("step")
        return dispatch(plan)

    def fetched(handle: Any) -> Any:
        in_flight.clear()
        return fetch(handle)

    runner.dispatch, runner.fetch = watched, fetched


class Drafters:
    """Their folders, with random weights, and targets that they fit."""

    def __init__(self, root: Path):
        self.root = root

    def target(self, drafter: str | None) -> Path:
        return self._deepseek if drafter == "mtp" else self._tiny

    def config(self, drafter: str, off_at: int) -> dict[str, Any]:
        """For `--speculative-config`. off_at: with so many rows there are no drafts, and steps overlap."""
        by_rows = {f"1-{off_at - 1}": DRAFTS, f"{off_at}": 0}
        more: dict[str, Any] = {"num_speculative_tokens": DRAFTS, "num_speculative_tokens_per_batch_size": by_rows}
        match drafter:
            case "ngram":
                more |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
            case "eagle":  # the one whose drafts are trees here
                more |= {"model": str(self._eagle), "eagle_topk": 2, "eagle_num_steps": 2}
            case "suffix" | "mtp":
                pass
            case _:
                more |= {"model": str(getattr(self, f"_{drafter}"))}
        return {"method": drafter, **more}

    @cached_property
    def _tiny(self) -> Path:
        return write_tiny_model(self.root / "tiny", self._weights(), vocab_size=VOCAB)

    @cached_property
    def _deepseek(self) -> Path:
        folder, rng = write_with_mtp(self.root / "deepseek"), np.random.default_rng(5)
        config = json.loads((folder / "config.json").read_text())
        named = load_file(folder / "model.safetensors")
        for name, value in named.items():
            if value.shape == (config["vocab_size"], config["hidden_size"]):
                named[name] = rng.normal(0, 0.3, (VOCAB, value.shape[1])).astype(np.float32)
        last = f"model.layers.{config['num_hidden_layers']}."
        named[last + "embed_tokens.weight"] = named["model.embed_tokens.weight"]
        named[last + "shared_head.head.weight"] = named["lm_head.weight"]
        save_file(named, folder / "model.safetensors")
        longer = {"vocab_size": VOCAB, "max_position_embeddings": 128}
        (folder / "config.json").write_text(json.dumps(config | longer))
        return folder

    @cached_property
    def _draft_model(self) -> Path:
        """The target with one tensor changed: right often, not always."""
        weights = self._weights()
        weights["model.norm.weight"] = weights["model.norm.weight"] * np.linspace(0.5, 1.5, DIM, dtype=np.float32)
        return write_tiny_model(self.root / "draft", weights, vocab_size=VOCAB)

    @cached_property
    def _medusa(self) -> Path:
        weights = {}
        for head in range(DRAFTS):
            weights[f"medusa_head.{head}.0.linear.weight"] = self._normal(DIM, DIM, scale=0.05)
            weights[f"medusa_head.{head}.0.linear.bias"] = np.zeros(DIM, np.float32)
        config = {"medusa_num_heads": DRAFTS, "medusa_num_layers": 1, "tie_word_embeddings": True}
        return self._write("medusa", config, weights)

    @cached_property
    def _eagle(self) -> Path:
        layer = self._layer("layers.0.", DIM)
        del layer["layers.0.input_layernorm.weight"]
        return self._write("eagle", self._hf(), {"fc.weight": self._normal(DIM, 2 * DIM), **layer})

    @cached_property
    def _eagle3(self) -> Path:
        draft_vocab = 512
        weights = self._layer("midlayer.", 2 * DIM) | {
            "midlayer.hidden_norm.weight": np.ones(DIM, np.float32), "norm.weight": np.ones(DIM, np.float32),
            "fc.weight": self._normal(DIM, 3 * DIM), "lm_head.weight": self._normal(draft_vocab, DIM),
            "d2t": np.arange(draft_vocab) * 3, "t2d": np.isin(np.arange(VOCAB), np.arange(draft_vocab) * 4),
        }  # fmt: skip
        config = self._hf(draft_vocab_size=draft_vocab, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
        return self._write("eagle3", config, weights)

    @cached_property
    def _dflash(self) -> Path:
        config = self._hf(model_type="qwen3", num_hidden_layers=2, block_size=DRAFTS + 1,
                          dflash_config={"mask_token_id": 2, "target_layer_ids": [0]})  # fmt: skip
        weights = {"fc.weight": self._normal(DIM, DIM), "hidden_norm.weight": np.ones(DIM, np.float32),
                   "norm.weight": np.ones(DIM, np.float32)}  # fmt: skip
        for layer in range(2):
            weights |= self._layer(f"layers.{layer}.", DIM)
            weights |= {f"layers.{layer}.self_attn.{x}_norm.weight": np.ones(HEAD_DIM, np.float32) for x in "qk"}
        return self._write("dflash", config, weights)

    @staticmethod
    def _weights() -> dict[str, np.ndarray]:
        weights = tensors()
        return weights | {"model.embed_tokens.weight": weights["model.embed_tokens.weight"][:VOCAB]}

    def _hf(self, **more: Any) -> dict[str, Any]:
        return {**CONFIG, "vocab_size": VOCAB, "num_hidden_layers": 1, **more}

    def _layer(self, prefix: str, width: int) -> dict[str, np.ndarray]:
        """width: of what attention reads."""
        shapes = {"self_attn.q_proj": (HEADS * HEAD_DIM, width), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, width),
                  "self_attn.v_proj": (KV_HEADS * HEAD_DIM, width), "self_attn.o_proj": (DIM, HEADS * HEAD_DIM),
                  "mlp.gate_proj": (FFN, DIM), "mlp.up_proj": (FFN, DIM), "mlp.down_proj": (DIM, FFN)}  # fmt: skip
        weights = {f"{prefix}{name}.weight": self._normal(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = np.ones(DIM, np.float32)
        return weights

    @staticmethod
    def _normal(*shape: int, scale: float = 0.3) -> np.ndarray:
        return np.random.default_rng(shape).normal(0, scale, shape).astype(np.float32)

    def _write(self, name: str, config: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
        folder = self.root / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(weights, folder / "model.safetensors")
        return folder
