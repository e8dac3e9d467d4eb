"""A runner for core processes: tokens follow from seed and output index alone, so a test in another process can tell
what they must be. `EngineConfig.model` names a fault to have."""

import os
import time
import zlib

from serving.config import EngineConfig
from serving.engine.plan import StepPlan, StepResult
from serving.errors import ConfigError, EngineDead
from serving.request import EngineInfo, EngineRequest, Logprobs, SamplingParams

VOCAB = 1000
EOS = (VOCAB,)  # never sampled


def token_at(seed: int | None, output_index: int) -> int:
    return zlib.crc32(f"{seed} {output_index}".encode()) % VOCAB


def request(name: str, *, seed: int = 0, max_tokens: int = 8, prompt_len: int = 5, **fields) -> EngineRequest:
    sampling = SamplingParams(seed=seed, max_tokens=max_tokens, **fields)
    return EngineRequest(
        request_id=name, prompt_token_ids=[seed % VOCAB] * prompt_len, sampling=sampling, arrival_time=time.time()
    )


def outputs(seed: int, count: int) -> list[int]:
    return [token_at(seed, index) for index in range(count)]


class SeedRunner:
    num_groups = 1
    drafts_on_device = False
    decode_seconds: dict[tuple[int, int], float] = {}

    def __init__(self, config: EngineConfig, step_seconds: float):
        self.page_size = config.block_size or 16
        self.num_pages = config.num_pages or 512
        self.max_num_seqs = config.max_num_seqs or 16
        self.max_num_batched_tokens = config.max_num_batched_tokens or 128
        self.max_model_len = config.max_model_len or 4096
        self.vocab_size = VOCAB
        self.steps = 0
        self._fault = config.model
        self._step_seconds = step_seconds

    def dispatch(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        if self._fault == "fail at step 5" and self.steps == 5:
            raise RuntimeError("the fake device broke")
        logprobs = [[Logprobs(0, -1.0, 1, [], [])] if row.sampling.logprobs is not None else None for row in plan.rows]
        tokens = [[token_at(row.sampling.seed, row.output_index)] if row.samples else [] for row in plan.rows]
        targets = [
            None if row.targets is None else [Logprobs(int(t), -1.0, 1, [], []) for t in row.targets]
            for row in plan.rows
        ]
        nothing = [None] * len(tokens)
        return StepResult(token_ids=tokens, logprobs=logprobs, target_logprobs=targets, num_kept=[0] * len(tokens),
                          drafts=nothing)  # fmt: skip

    def fetch(self, handle: object) -> StepResult:
        assert isinstance(handle, StepResult)
        time.sleep(self._step_seconds)
        return handle

    def stats(self) -> dict[str, float]:
        return {"compile_misses": 0, "pack_seconds": 0.0, "dispatch_seconds": 0.0, "padding_tokens": 0}

    def close(self, reason: str = "") -> None:
        pass


def make_info(runner) -> EngineInfo:
    return EngineInfo(
        max_model_len=runner.max_model_len,
        vocab_size=runner.vocab_size,
        max_num_seqs=runner.max_num_seqs,
        max_num_batched_tokens=runner.max_num_batched_tokens,
        num_pages=runner.num_pages,
        page_size=runner.page_size,
        dtype="float32",
        kv_cache_dtype="float32",
        attention_backend="none",
        mesh="1x1",
        model_family="fake",
        num_parameters=0,
    )


def build(config: EngineConfig) -> tuple[SeedRunner, EngineInfo, tuple[int, ...], None]:
    if config.model == "bad config":
        raise ConfigError("no model at /nowhere: give --model a path")
    if config.model == "a host gone":
        raise EngineDead("host 1 is gone")
    if config.model == "bug at start":
        raise RuntimeError("a bug in start-up")
    if config.model == "killed at start":
        os.kill(os.getpid(), 9)
    runner = SeedRunner(config, step_seconds=0.001 if config.model == "fast" else 0.01)
    return runner, make_info(runner), EOS, None
