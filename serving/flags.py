"""Command-line flags to `ServerConfig`. Names follow vLLM where the meaning is the same."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import NoReturn, get_args

from serving.config import (
    PARALLEL_SIZES,
    All2AllBackend,
    EngineConfig,
    EplbConfig,
    JsonConfig,
    ServerConfig,
    StructuredOutputsConfig,
    config_of,
    mesh_of,
)
from serving.decoding.reasoning.registry import REASONING_PARSERS
from serving.decoding.speculation.config import SpeculativeConfig
from serving.decoding.tools.registry import TOOL_PARSERS
from serving.distributed.plan import DEFAULT_PORT, DEFAULT_TIMEOUT_SECONDS, HostFlags, plan_hosts
from serving.errors import ConfigError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help lists the flags)")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Appends the default, where there is one to tell."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, "", [], False):
            return action.help
        return super()._get_help_string(action)


def parse_flags(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> ServerConfig:
    """`environment`: where a cluster's launcher may tell which of several hosts this is. Raises ConfigError with one
    line for a bad flag."""
    args = _parser().parse_args([_with_hyphens(arg) for arg in argv])
    names: list[str] = args.served_model_name or []
    engine = EngineConfig(
        model=args.model,
        tokenizer=args.tokenizer,
        dtype=args.dtype,
        mesh=mesh_of(args.mesh, {axis: getattr(args, name) for axis, name in PARALLEL_SIZES.items()}),
        hosts=plan_hosts(
            HostFlags(
                nnodes=args.nnodes,
                node_rank=args.node_rank,
                master_addr=args.master_addr,
                master_port=args.master_port,
                distributed_timeout_seconds=args.distributed_timeout_seconds,
            ),
            environment or {},
        ),
        attention_backend=args.attention_backend,
        enable_expert_parallel=args.enable_expert_parallel,
        all2all_backend=args.all2all_backend,
        enable_dbo=args.enable_dbo,
        enable_eplb=args.enable_eplb,
        eplb_config=_json_config("--eplb-config", EplbConfig, args.eplb_config),
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        context_parallel_threshold=args.context_parallel_threshold,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        block_size=args.block_size,
        num_pages=args.num_pages,
        gpu_memory_utilization=args.gpu_memory_utilization,
        enable_prefix_caching=args.enable_prefix_caching,
        scheduling_policy=args.scheduling_policy,
        max_num_waiting=args.max_num_waiting,
        speculative_config=args.speculative_config,
        structured_outputs_config=_json_config("--structured-outputs-config", StructuredOutputsConfig,
                                               args.structured_outputs_config),
        compilation_cache_dir=args.compilation_cache_dir,
        check_integrity=args.check_integrity,
    )
    return ServerConfig(
        engine=engine,
        served_model_name=names[0] if names else None,
        served_model_aliases=tuple(names[1:]),
        host=args.host,
        port=args.port,
        grpc_port=args.grpc_port,
        api_keys=tuple(args.api_key),
        admin_api_key=args.admin_api_key,
        chat_template=args.chat_template,
        enable_auto_tool_choice=args.enable_auto_tool_choice,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        max_body_bytes=args.max_body_bytes,
        max_logprobs=args.max_logprobs,
        stream_interval=args.stream_interval,
        shutdown_grace_seconds=args.shutdown_grace_seconds,
    )


def _with_hyphens(arg: str) -> str:
    """`--max_model_len` as `--max-model-len`."""
    name, *value = arg.split("=", 1)
    return "=".join([name.replace("_", "-"), *value]) if name.startswith("--") else arg


def _json_config(flag: str, kind: type[JsonConfig], text: str) -> JsonConfig:
    try:
        return config_of(flag, kind, json.loads(text))
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r} is not JSON: {error}") from error


def _parser() -> _Parser:
    parser = _Parser(prog="python -m serve", description="Serve a large language model over HTTP (OpenAI) and gRPC.",
                     formatter_class=_Formatter)
    engine, server = EngineConfig(), ServerConfig()
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="", metavar="PATH",
                       help="GGUF file, Hugging Face folder or Orbax folder; without it SmolLM2-135M-Instruct")
    model.add_argument("--tokenizer", metavar="PATH", help="tokenizer folder or GGUF file, if not the model's own")
    model.add_argument("--served-model-name", nargs="+", metavar="NAME",
                       help="name in the API, if not the path's last part; answers have the first of several")
    model.add_argument("--chat-template", metavar="FILE", help="Jinja file that replaces the model's chat template")
    model.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default=engine.dtype,
                       help="of weights, activations and KV; auto: bfloat16, on CPUs that are slow at it float32")
    model.add_argument("--max-model-len", type=int, metavar="TOKENS", help="context length, if not the model's")

    devices = parser.add_argument_group("devices")
    devices.add_argument("--mesh", metavar="TxD", help="tensor x data, as 8x1; or any of tensor=4,data=2,context=2,"
                         "pipeline=2 (default: 1x1)")
    devices.add_argument("--attention-backend", choices=("auto", "xla", "mosaic_tpu", "mosaic_gpu"),
                         default=engine.attention_backend,
                         help="auto: the device's kernel where it fits, else xla; a kernel on a CPU is simulated")
    for axis, name in PARALLEL_SIZES.items():
        long = f"--{name.replace('_', '-')}"
        short = "-" + "".join(word[0] for word in name.removesuffix("_size").split("_"))  # vLLM's, as -tp
        devices.add_argument(long, short, type=int, metavar="N", help=f"as --mesh {axis}=N")
    devices.add_argument("--context-parallel-threshold", type=int, metavar="TOKENS",
                         help="steps of so many tokens and more are shared out over the context axis (default: 1024, "
                         "or a full step where that is less)")
    devices.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE",
                         help="share of device memory to use (default: 0.9; on a CPU 0.1 of the host's)")
    devices.add_argument("--num-pages", type=int, metavar="N", help="KV pages of each data group, if not all that fit")
    devices.add_argument("--compilation-cache-dir", metavar="FOLDER", default=engine.compilation_cache_dir,
                         help='where compiled steps are kept (default: ~/.cache/pageloom/xla; "" turns it off)')

    experts = parser.add_argument_group("experts")
    experts.add_argument("--enable-expert-parallel", "-ep", action="store_true",
                         help="divide experts over the axes data and tensor, instead of tensor alone")
    experts.add_argument("--all2all-backend", choices=get_args(All2AllBackend), default=engine.all2all_backend,
                         help="how tokens meet experts of other data groups; auto: by bytes and step size")
    experts.add_argument("--enable-dbo", action="store_true",
                         help="two micro-batches in layers with experts: one's rows travel while the other's compute")
    experts.add_argument("--enable-eplb", action="store_true", help="move experts between devices, by measured load")
    experts.add_argument("--eplb-config", metavar="JSON", default="{}",
                         help="any of " + ", ".join(f'"{f.name}" ({f.default})' for f in fields(EplbConfig)))

    hosts = parser.add_argument_group(
        "hosts", "Without these, what a TPU slice, SLURM or a LeaderWorkerSet says in the environment.")
    hosts.add_argument("--nnodes", "-n", type=int, metavar="N",
                       help="hosts that serve the model together; 1: this one alone, whatever the environment says")
    hosts.add_argument("--node-rank", "-r", type=int, metavar="RANK",
                       help="which of them this is; 0 schedules and answers")
    hosts.add_argument("--master-addr", metavar="HOST", help="address of host 0, as the others reach it")
    hosts.add_argument("--master-port", type=int, metavar="PORT",
                       help=f"on host 0, for jax's coordinator; the next one for steps (default: {DEFAULT_PORT})")
    hosts.add_argument("--distributed-timeout-seconds", type=float, metavar="S",
                       help=f"how long hosts wait for each other at start (default: {DEFAULT_TIMEOUT_SECONDS:g})")

    batching = parser.add_argument_group("batching")
    batching.add_argument("--max-num-seqs", type=int, metavar="N",
                          help="sequences in a step of each data group (default: 256, on a CPU 32)")
    batching.add_argument("--max-num-batched-tokens", type=int, metavar="N",
                          help="token budget of a step of each data group (default: 2048, on a CPU 512)")
    batching.add_argument("--long-prefill-token-threshold", type=int, metavar="N",
                          default=engine.long_prefill_token_threshold,
                          help="most prompt tokens that one sequence brings to a step; 0: no limit")
    batching.add_argument("--block-size", type=int, metavar="TOKENS", default=engine.block_size,
                          help="tokens in a KV page (default: 16 on a CPU, 64 on a GPU, 128 on a TPU)")
    batching.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction,
                          default=engine.enable_prefix_caching, help="reuse the KV of shared prompt prefixes")
    batching.add_argument("--scheduling-policy", choices=("fcfs", "priority"), default=engine.scheduling_policy)
    batching.add_argument("--max-num-waiting", type=int, metavar="N", default=engine.max_num_waiting,
                          help="queued sequences beyond which requests get 429")
    batching.add_argument("--speculative-config", "-sc", type=SpeculativeConfig.parse, metavar="JSON",
                          help='drafts to verify, as {"method": "ngram", "num_speculative_tokens": 5}; '
                          "docs/speculation.md lists methods and keys. Outputs stay what they are, but with "
                          '"rejection_sample_method": "typical", which changes their distribution')
    batching.add_argument("--structured-outputs-config", metavar="JSON", default="{}",
                          help="any of " + ", ".join(f'"{f.name}"' for f in fields(StructuredOutputsConfig))
                          + "; docs/structured_output.md explains them")
    batching.add_argument("--check-integrity", action="store_true", help="check the KV books after every step (slow)")

    api = parser.add_argument_group("API")
    api.add_argument("--host", default=server.host)
    api.add_argument("--port", type=int, default=server.port, help="HTTP; 0: any free port")
    api.add_argument("--grpc-port", type=int, default=server.grpc_port, help="gRPC; off unless given, 0: any free port")
    api.add_argument("--api-key", action="extend", nargs="+", default=[], metavar="KEY",
                     help="require `Authorization: Bearer KEY` with one of these")
    api.add_argument("--admin-api-key", metavar="KEY", help="key of the admin endpoints, if not the API keys")
    api.add_argument("--enable-auto-tool-choice", action="store_true",
                     help='let the model call tools when it wants to (tool_choice "auto"); needs --tool-call-parser')
    api.add_argument("--tool-call-parser", choices=sorted(TOOL_PARSERS), help="how the model writes calls")
    api.add_argument("--reasoning-parser", choices=sorted(REASONING_PARSERS),
                     help="how the model marks its reasoning, which is then told apart from the answer")
    api.add_argument("--max-body-bytes", type=int, default=server.max_body_bytes, metavar="N")
    api.add_argument("--max-logprobs", type=int, default=server.max_logprobs, metavar="N")
    api.add_argument("--stream-interval", type=int, default=server.stream_interval, metavar="TOKENS",
                     help="tokens between two streamed chunks")
    api.add_argument("--shutdown-grace-seconds", type=float, default=server.shutdown_grace_seconds, metavar="S",
                     help="how long running requests may finish after SIGTERM")
    return parser
