"""The service's configuration: one frozen dataclass, filled from flags by `serve.py` and validated at birth."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from serving.decoding.speculation.config import SpeculativeConfig
from serving.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16"]
All2AllBackend = Literal["auto", "ragged_all_to_all", "allgather_reducescatter"]  # the names of `model.expert_options`
PARALLEL_SIZES = {
    "tensor": "tensor_parallel_size",
    "data": "data_parallel_size",
    "context": "prefill_context_parallel_size",
    "pipeline": "pipeline_parallel_size",
}  # of the mesh's axes, as vLLM calls them
MAX_LOGPROBS = 20  # the device computes no more for a token; a server may allow fewer


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """This host's place among the hosts that serve one model together. Made by `serving.distributed.plan`."""

    count: int
    rank: int  # 0 schedules and answers; the others follow its steps
    addresses: tuple[str, ...]  # by rank; empty where only that host itself knows
    port: int = 0  # of jax's coordinator, on host 0
    timeout_seconds: float = 300.0  # for all hosts to come

    @property
    def leader(self) -> str:
        return self.addresses[0]

    @property
    def channel_port(self) -> int:
        """Where host 0 sends its steps."""
        return self.port + 1

    def name(self, rank: int) -> str:
        return f"host {rank} ({self.addresses[rank]})" if self.addresses[rank] else f"host {rank}"


@dataclass(frozen=True, kw_only=True)
class EplbConfig:
    """How experts move between devices; names and defaults are vLLM's."""

    window_size: int = 1000  # steps whose load counts
    step_interval: int = 3000  # steps between two placements
    num_redundant_experts: int = 0  # replicas of busy experts in each layer, on all devices together

    def __post_init__(self) -> None:
        for name, least in (("window_size", 1), ("step_interval", 1), ("num_redundant_experts", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:  # True is an int, too
                raise ConfigError(f"--eplb-config: {name} is {value!r}, must be a whole number of at least {least}")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsConfig:
    """Of outputs that follow a grammar; vLLM's keys where it has them."""

    backend: Literal["auto", "guidance"] = "auto"  # llguidance either way
    disable_any_whitespace: bool | None = None  # in JSON, for requests that do not say; see docs/structured_output.md
    disable_additional_properties: bool = False  # in JSON, likewise
    enable_fast_forward: bool = True  # tokens that the grammar forces are appended without sampling

    def __post_init__(self) -> None:
        for name, allowed in (("backend", ("auto", "guidance")), ("disable_any_whitespace", (None, True, False)),
                              ("disable_additional_properties", (True, False)),
                              ("enable_fast_forward", (True, False))):  # fmt: skip
            value = getattr(self, name)
            if not any(value is one for one in allowed) and not (isinstance(value, str) and value in allowed):
                raise ConfigError(f"--structured-outputs-config: {name} is {value!r}, must be one of "
                                  f"{', '.join(map(json.dumps, allowed))}")


JsonConfig = TypeVar("JsonConfig", EplbConfig, StructuredOutputsConfig)


def config_of(flag: str, kind: type[JsonConfig], given: Any) -> JsonConfig:
    """From keys and values as JSON has them."""
    known = {f.name for f in fields(kind)}
    unknown = sorted(given.keys() - known) if isinstance(given, Mapping) else None
    if unknown is None or unknown:
        what = f"unknown {', '.join(unknown)}" if unknown else "not an object"
        raise ConfigError(f"{flag} {given!r}: {what}; it may have {', '.join(sorted(known))}")
    return kind(**given)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything the engine core needs. None means: chosen from the model or the device, and printed at start."""

    model: str = ""  # a GGUF file, a Hugging Face folder, an Orbax folder; empty: the embedded default
    tokenizer: str | None = None  # None: from the model
    dtype: Dtype = "auto"
    mesh: str = "1x1"
    hosts: HostPlan | None = None  # None: this host alone
    attention_backend: Literal["auto", "xla", "mosaic_tpu", "mosaic_gpu"] = "auto"  # a kernel on a CPU: simulated
    enable_expert_parallel: bool = False  # experts over data x tensor instead of tensor
    all2all_backend: All2AllBackend = "auto"  # how tokens meet experts of other data groups
    enable_dbo: bool = False  # layers with experts in two micro-batches: rows of one travel while the other computes
    enable_eplb: bool = False  # experts move between devices as they are used
    eplb_config: EplbConfig = field(default_factory=EplbConfig)
    max_model_len: int | None = None  # tokens, prompt and output together
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None  # token budget of a step
    context_parallel_threshold: int | None = None  # tokens of a step that the context axis shares out; None: 1024
    long_prefill_token_threshold: int = 0  # most prompt tokens one sequence may bring to a step; 0: no limit
    block_size: int | None = None  # tokens in a KV page
    num_pages: int | None = None  # None: what fits
    gpu_memory_utilization: float | None = None  # share of device memory (host memory on CPU) that may be used
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    max_num_waiting: int = 4096  # requests beyond it are refused with 429
    speculative_config: SpeculativeConfig | None = None  # None: no drafts
    structured_outputs_config: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    compilation_cache_dir: str | None = None  # None: in the user's cache folder; "": off
    check_integrity: bool = False  # check the KV books after every step (tests)

    @property
    def is_follower(self) -> bool:
        """Whether this host runs what another host schedules."""
        return self.hosts is not None and self.hosts.rank > 0

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_pages",
                     "context_parallel_threshold", "max_num_waiting"):
            _at_least(1, name, getattr(self, name))
        _at_least(0, "long_prefill_token_threshold", self.long_prefill_token_threshold)
        if not self.enable_eplb and self.eplb_config != EplbConfig():
            raise ConfigError("--eplb-config says how experts move: give --enable-eplb too")
        utilization = self.gpu_memory_utilization
        if utilization is not None and not 0 < utilization <= 1:
            raise ConfigError(f"--gpu-memory-utilization is {utilization}, must be in (0, 1]")
        budget, rows = self.max_num_batched_tokens, self.max_num_seqs
        if budget is not None and rows is not None and budget < rows:
            raise ConfigError(f"--max-num-batched-tokens {budget} must be at least --max-num-seqs {rows}: "
                              "every running sequence gets one token a step")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """An engine and the front ends before it."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    served_model_name: str | None = None  # None: from the model's path
    served_model_aliases: tuple[str, ...] = ()  # other names that requests may use
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None  # None: off
    api_keys: tuple[str, ...] = ()
    admin_api_key: str | None = None  # None: the API keys also open the admin endpoints
    chat_template: str | None = None
    enable_auto_tool_choice: bool = False  # whether the model may decide to call tools
    tool_call_parser: str | None = None  # how it writes calls: a name of `serving.decoding.tools.registry`
    reasoning_parser: str | None = None  # of `serving.decoding.reasoning.registry`; None: reasoning is content
    max_body_bytes: int = 32 << 20
    max_logprobs: int = MAX_LOGPROBS
    stream_interval: int = 1  # tokens between two streamed chunks
    shutdown_grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "stream_interval"):
            _at_least(1, name, getattr(self, name))
        for name in ("port", "grpc_port", "shutdown_grace_seconds"):
            _at_least(0, name, getattr(self, name))
        for name, keys in (("api-key", self.api_keys), ("admin-api-key", (self.admin_api_key,))):
            for key in keys:
                if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
                    raise ConfigError(f"--{name} has {len(key)} characters that no HTTP header can carry as a key: it "
                                      "must be printable ASCII, at least one character, without spaces at its ends")
        if not 0 <= self.max_logprobs <= MAX_LOGPROBS:
            raise ConfigError(f"--max-logprobs is {self.max_logprobs}, must be in 0 to {MAX_LOGPROBS}")
        if self.enable_auto_tool_choice != (self.tool_call_parser is not None):
            raise ConfigError("--enable-auto-tool-choice and --tool-call-parser need each other: give both or none")


def mesh_of(mesh: str | None, sizes: Mapping[str, int | None]) -> str:
    """From `--mesh`, or from the sizes of PARALLEL_SIZES by axis; one device where neither says more."""
    named = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size is not None)
    if named and mesh is not None:
        flags = " / ".join(f"--{name.replace('_', '-')}" for name in PARALLEL_SIZES.values())
        raise ConfigError(f"--mesh and {flags} say the same thing: give one")
    return named or ("1x1" if mesh is None else mesh)


def _at_least(least: int, name: str, value: float | None) -> None:
    if value is not None and not value >= least:
        raise ConfigError(f"--{name.replace('_', '-')} is {value}, must be at least {least}")
