"""From an `EngineConfig` to a runner: opens the checkpoint, lays the model out on a mesh, loads it, compiles its steps.

Everything that this prints goes to standard error, for the one who started the service.
"""

import sys
from dataclasses import dataclass
from functools import partial

import jax
from msgspec import to_builtins

from checkpoints.open import Checkpoint
from model.config import ModelConfig
from model.families.registry import read_config
from model.speculative.drafter import DeviceDrafter
from model.typical_acceptance import Typical
from serving.config import EngineConfig
from serving.decoding.grammar.compiler import Compiler
from serving.decoding.grammar.tokens import vocabulary
from serving.decoding.speculation.config import SpeculativeConfig
from serving.distributed.fingerprint import of_checkpoint, of_flags
from serving.distributed.following import report_failure
from serving.distributed.hosts import Alone, Hosts
from serving.distributed.join import join_hosts
from serving.distributed.leading import LeaderHosts, refuse_followers
from serving.distributed.runner import LeadingRunner
from serving.drafters.loading import Surroundings, naming_the_flag, open_named
from serving.drafters.make import check_speculation, load_drafter
from serving.engine.compiling import Compile
from serving.engine.plan import Runner
from serving.engine.speculating import tree_words
from serving.errors import ConfigError
from serving.loading import LoadedModel, expert_options, load, open_model, page_size
from serving.report import start_report
from serving.request import EngineInfo
from serving.runner.compiler import use_persistent_cache
from serving.runner.runner import ModelRunner, RunnerConfig
from serving.runner.shapes import DraftShapes, Spreading
from serving.tokenizer.load import load_tokenizer
from sharding.mesh import parse_mesh


@dataclass(frozen=True)
class Built:
    runner: ModelRunner  # of this host
    hosts: Hosts
    info: EngineInfo
    eos_ids: tuple[int, ...]
    compile_grammar: Compile | None  # of host 0


def build_core(config: EngineConfig, *, progress: bool = True
               ) -> tuple[Runner, EngineInfo, tuple[int, ...], Compile | None]:  # fmt: skip
    """The runner, what to tell front ends, the ids that end a generation, and what compiles grammars."""
    built = build(config, progress=progress)
    runner = LeadingRunner(built.runner, built.hosts) if isinstance(built.hosts, LeaderHosts) else built.runner
    return runner, built.info, built.eos_ids, built.compile_grammar


def build(config: EngineConfig, *, progress: bool = True) -> Built:
    """The same on every host. Raises ConfigError on all for what is wrong with one."""
    use_persistent_cache(config.compilation_cache_dir)
    hosts = _join(config, progress)
    try:
        built = _build(config, hosts, progress)
        hosts.check_same("what was built", _identity(built))
    except Exception as error:  # of any kind: the other hosts wait
        hosts.fail(error)
        raise
    return built


def _join(config: EngineConfig, progress: bool) -> Hosts:
    if config.hosts is None:
        return Alone()
    try:
        entries = host_fingerprint(config, progress)
    except ConfigError as error:
        tell = report_failure if config.is_follower else refuse_followers
        tell(config.hosts, str(error))
        raise
    return join_hosts(config.hosts, entries)


def host_fingerprint(config: EngineConfig, progress: bool) -> dict[str, str]:
    """What hosts compare before they start. Raises ConfigError."""
    entries = of_flags(config)
    with open_model(config, progress) as checkpoint:
        entries |= of_checkpoint("the model's", checkpoint.config, checkpoint.source)
    with naming_the_flag(), open_named(config.speculative_config) as drafter:
        if drafter is not None:
            entries |= of_checkpoint("the drafter's", drafter.config, drafter.source)
    return entries


def _identity(built: Built) -> dict[str, str]:
    """What steps depend on, beyond the fingerprint of flags, versions and checkpoint."""
    entries = {name: str(value) for name, value in to_builtins(built.info).items()}
    device = jax.local_devices()[0].device_kind
    return {**entries, "step shapes": str(built.runner.shapes), "devices": f"{jax.device_count()} x {device}"}


def _build(config: EngineConfig, hosts: Hosts, progress: bool) -> Built:
    with open_model(config, progress) as checkpoint:
        # What is quick comes first, so that a mistake shows before the weights are read.
        model = read_config(checkpoint.config, config.max_model_len)
        runner_config = _runner_config(config, model, hosts, progress)
        if config.speculative_config is not None:
            check_speculation(config.speculative_config, model, parse_mesh(config.mesh))
        # Followers meet no text; where a generation ends is host 0's to see.
        tokenizer = None if config.is_follower else load_tokenizer(config.tokenizer or str(checkpoint.path))
        loaded = load(checkpoint, model, config, hosts, progress)
        drafter = _drafter(config, loaded, runner_config, checkpoint)
    runner = ModelRunner(loaded.model, runner_config, loaded.kernels, drafter)
    info = EngineInfo(
        max_model_len=runner.max_model_len,
        vocab_size=model.vocab_size,
        num_groups=runner.num_groups,
        max_num_seqs=runner.max_num_seqs,
        max_num_batched_tokens=runner.max_num_batched_tokens,
        num_pages=runner.num_pages,
        page_size=runner.page_size,
        dtype=str(loaded.dtype),
        kv_cache_dtype=str(loaded.dtype),
        attention_backend=loaded.kernels.attention.choice.name,
        mesh=str(parse_mesh(config.mesh)),
        model_family=model.family,
        num_parameters=loaded.num_parameters,
        acceptance="exact" if runner_config.typical is None else "typical",
    )
    if progress:
        report = start_report(runner, loaded.model, loaded.params, loaded.kernels, info)
        print("\n".join(report), file=sys.stderr, flush=True)
    eos_ids = dict.fromkeys((*model.eos_ids, *(tokenizer.eos_ids if tokenizer else ())))
    eos_ids = tuple(token_id for token_id in eos_ids if 0 <= token_id < model.vocab_size)  # no other can be made
    compile_grammar = None
    if tokenizer is not None:
        compile_grammar = Compiler(partial(vocabulary, tokenizer, model.vocab_size, eos_ids),
                                   fast_forward=config.structured_outputs_config.enable_fast_forward).compile
    return Built(runner, hosts, info, eos_ids, compile_grammar)


def _spreading(config: EngineConfig, max_num_batched_tokens: int) -> Spreading | None:
    context, threshold = parse_mesh(config.mesh).context, config.context_parallel_threshold
    if context == 1:
        if threshold is not None:
            raise ConfigError(f"--context-parallel-threshold {threshold}: --mesh {config.mesh} has no context axis; "
                              "--mesh context=2 has")  # fmt: skip
        return None
    if threshold is not None and threshold > max_num_batched_tokens:
        raise ConfigError(f"--context-parallel-threshold {threshold}: no step has more than --max-num-batched-tokens "
                          f"{max_num_batched_tokens}")  # fmt: skip
    return Spreading(context=context, threshold=threshold or min(1024, max_num_batched_tokens))


def _drafter(config: EngineConfig, loaded: LoadedModel, runner: RunnerConfig, checkpoint: Checkpoint
             ) -> DeviceDrafter | None:  # fmt: skip
    """None where drafts are made on the host, or not at all."""
    speculative, path = config.speculative_config, str(checkpoint.path)
    if speculative is None or speculative.on_host:
        return None
    around = Surroundings(
        target=loaded.model, path=path, tokenizer=config.tokenizer or path, dtype=loaded.dtype,
        page_size=runner.page_size, max_num_seqs=runner.max_num_seqs, max_model_len=runner.max_model_len,
        attention_backend=config.attention_backend, experts=expert_options(config), progress=runner.progress,
    )  # fmt: skip
    return load_drafter(speculative, around)


def _draft_shapes(config: SpeculativeConfig | None) -> DraftShapes:
    if config is None:
        return DraftShapes()
    always = not config.on_host and not config.may_be_off
    return DraftShapes(lengths=config.lengths, tree_words=tree_words(config), always=always,
                       adaptive=config.chooses_by_goodput)  # fmt: skip


def _typical(config: SpeculativeConfig | None) -> Typical | None:
    if config is None or config.rejection_sample_method == "standard":
        return None
    return Typical(config.posterior_threshold, config.posterior_alpha)


def _runner_config(config: EngineConfig, model: ModelConfig, hosts: Hosts, progress: bool) -> RunnerConfig:
    on_cpu = jax.default_backend() == "cpu"
    max_model_len = config.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise ConfigError(f"--max-model-len {max_model_len} is beyond the model's context of {model.max_position}")
    rows = config.max_num_seqs or (32 if on_cpu else 256)
    tokens = config.max_num_batched_tokens or max(512 if on_cpu else 2048, rows)
    if tokens < rows:
        raise ConfigError(f"--max-num-batched-tokens {tokens} must be at least --max-num-seqs {rows}: "
                          "every running sequence gets one token a step")  # fmt: skip
    if config.num_pages is not None and config.num_pages < 2:
        raise ConfigError(f"--num-pages {config.num_pages} must be at least 2: page 0 is scratch")
    return RunnerConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        max_model_len=max_model_len,
        may_shorten=config.max_model_len is None,
        page_size=page_size(config),
        num_pages=config.num_pages,
        memory_share=config.gpu_memory_utilization,
        spreading=_spreading(config, tokens),
        drafts=_draft_shapes(config.speculative_config),
        typical=_typical(config.speculative_config),
        least_of_hosts=hosts.least,
        eplb=config.eplb_config,
        progress=progress,
    )
