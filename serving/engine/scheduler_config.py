"""The limits a scheduler keeps to. Sequences, tokens and pages are those of each data group."""

from dataclasses import dataclass

from serving.config import EngineConfig
from serving.engine.plan import Runner
from serving.engine.speculating import SpeculationParts, speculation_parts


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    num_groups: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_pages: int  # with the scratch page
    page_size: int
    eos_token_ids: tuple[int, ...]
    long_prefill_token_threshold: int = 0  # 0: no limit
    enable_prefix_caching: bool = True
    policy: str = "fcfs"
    max_num_waiting: int = 4096
    vocab_size: int = 0  # of the masks of grammars
    speculation: SpeculationParts | None = None

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(f"{self.max_num_batched_tokens=} must be at least {self.max_num_seqs=}")

    @classmethod
    def of(cls, runner: Runner, eos_token_ids: tuple[int, ...], config: EngineConfig) -> "SchedulerConfig":
        return cls(
            num_groups=runner.num_groups,
            max_num_seqs=runner.max_num_seqs,
            max_num_batched_tokens=runner.max_num_batched_tokens,
            max_model_len=runner.max_model_len,
            num_pages=runner.num_pages,
            page_size=runner.page_size,
            eos_token_ids=tuple(eos_token_ids),
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            enable_prefix_caching=config.enable_prefix_caching,
            policy=config.scheduling_policy,
            max_num_waiting=config.max_num_waiting,
            vocab_size=runner.vocab_size,
            speculation=speculation_parts(config.speculative_config, runner.decode_seconds),
        )
