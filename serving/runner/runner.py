"""Executes step plans: packs them, dispatches the compiled step, and reads results one step later.

The runner owns the weights and all device state. It compiles the closed shape set once; after that a step is one
host-to-device copy, one call, and one small copy back.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from model.build import Kernels
from model.sampling import SamplingState
from model.speculative.drafter import DeviceDrafter
from model.transformer import Transformer
from model.typical_acceptance import Typical
from serving.config import EplbConfig
from serving.engine.plan import Draft, GroupPlan, RowPlan, StepPlan, StepResult
from serving.errors import ConfigError
from serving.request import SamplingParams
from serving.runner.compiler import CompileCounter, compile_all, compile_step
from serving.runner.experts import ServedExperts
from serving.runner.memory import MemoryPlan, bytes_per_device, check_pool, device_memory, memory_share
from serving.runner.packing import PackedStep, Packer
from serving.runner.programs import StepProgram
from serving.runner.results import InFlight, read_result
from serving.runner.shapes import DraftShapes, Spreading, StepShape, pick_shape, step_shapes
from serving.runner.slots import SlotWriter, is_biased
from serving.runner.step import DeviceState, StepOutputs

TIMED_RUNS = 3  # of each step at the start, to know what drafts cost


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int  # tokens
    may_shorten: bool  # where the KV cache cannot hold a sequence of that length, take a shorter one
    page_size: int
    num_pages: int | None  # None: what fits
    memory_share: float | None
    eplb: EplbConfig = EplbConfig()
    spreading: Spreading | None = None  # over the context axis, if the mesh has one
    drafts: DraftShapes = DraftShapes()
    typical: Typical | None = None  # accept drafts by this rule, which changes what is sampled
    least_of_hosts: Callable[[str, int], int] = lambda name, mine: mine  # of the values that all hosts have
    progress: bool = False


class ModelRunner:
    """See `serving.engine.plan.Runner`, which this implements."""

    def __init__(self, model: Transformer, config: RunnerConfig, kernels: Kernels,
                 drafter: DeviceDrafter | None = None):  # fmt: skip
        self._program = StepProgram(model, kernels, max_num_seqs=config.max_num_seqs, num_drafts=config.drafts.most,
                                    drafter=drafter, typical=config.typical)  # fmt: skip
        self._params, self._config, self._rules = self._program.params, config, model.rules
        self.max_num_seqs, self.max_num_batched_tokens = config.max_num_seqs, config.max_num_batched_tokens
        self.max_model_len, self.page_size = config.max_model_len, config.page_size
        self.vocab_size, self.num_groups = model.config.vocab_size, model.rules.num_groups
        self.shapes = step_shapes(config.max_num_seqs, config.max_num_batched_tokens, config.spreading, config.drafts)
        self._biased = [[False] * config.max_num_seqs for _ in range(self.num_groups)]
        self._counters = {"pack_seconds": 0.0, "dispatch_seconds": 0.0, "padding_tokens": 0.0}

        self._experts = None
        if kernels.experts is not None:
            self._experts = ServedExperts(self._program, model.config, model.rules, kernels, config.eplb)
        self.memory: MemoryPlan | None = None
        self.num_pages = config.num_pages or self._fit_pages()
        self._fit_context()
        self._packer = Packer(num_groups=self.num_groups, max_num_seqs=config.max_num_seqs, row_pages=self._row_pages)
        shapes = self._program.state_shapes(self.num_pages)
        check_pool(self.num_pages, bytes_per_device(shapes.kv_pages), self._rules.mesh)
        self._steps = compile_all(
            {shape: lambda shape=shape: self._compile_step(shape, shapes) for shape in self.shapes},
            progress=config.progress,
        )
        self._slots = SlotWriter(self._rules, shapes.sampling, {shape.num_rows for shape in self.shapes})
        self._config.least_of_hosts("what is compiled", len(self._steps))  # none waits long for another's first step
        self._state = self._initial_state(shapes)
        self._compiles = CompileCounter()
        self._warm_up()
        self.decode_seconds: Mapping[tuple[int, int], float] = {}
        if config.drafts.adaptive:
            self.decode_seconds = self._time_decoding()
        self._compiles.start()

    # Set-up

    @property
    def memory_usage(self) -> dict[str, int]:
        """Bytes on one device, by kind. Temporaries are those of the largest step."""
        kv = bytes_per_device(self._state.kv_pages)
        drafting = bytes_per_device((self._state.drafter, self._state.drawn_from))
        largest = self._steps[self.shapes[-1]].memory_analysis()
        return {
            "weights": bytes_per_device(self._params),
            "KV": kv,
            **({"drafter's KV and state": drafting} if drafting else {}),
            "sampling state": bytes_per_device(self._state) - kv - drafting,
            "temporaries": 0 if largest is None else largest.temp_size_in_bytes,
        }

    @property
    def _row_pages(self) -> int:
        """Pages of a sequence of full length."""
        return -(-self.max_model_len // self.page_size)

    def _fit_pages(self) -> int:
        """Compiles the largest step with a tiny pool: its temporaries do not depend on the pool's size."""
        small = self._program.state_shapes(8)
        analysis = self._compile_step(self.shapes[-1], small).memory_analysis()
        if analysis is None:
            raise ConfigError("this backend has no memory analysis: give --num-pages")
        page = (bytes_per_device(self._program.state_shapes(16)) - bytes_per_device(small)) // 8  # a drafter's, too
        self.memory = MemoryPlan(
            limit=device_memory(self._rules.mesh),
            share=memory_share(self._rules.mesh.devices.flat[0].platform, self._config.memory_share),
            fixed=bytes_per_device(self._params) + bytes_per_device(small) - 8 * page,
            temporary=max(analysis.temp_size_in_bytes, self._experts.temporary if self._experts is not None else 0),
            page=page,
        )
        # One more page than all rows at full length can use, for the scratch page.
        pages = min(self.memory.num_pages, self.max_num_seqs * self._row_pages + 1)
        return self._config.least_of_hosts("num_pages", pages)

    def _fit_context(self) -> None:
        """A sequence of full length must fit the pool: a longer context would only be refused later."""
        capacity = (self.num_pages - 1) * self.page_size
        if self.max_model_len <= capacity:
            return
        if not self._config.may_shorten:
            raise ConfigError(
                f"--max-model-len {self.max_model_len} does not fit the KV cache of {self.num_pages - 1} pages x "
                f"{self.page_size} tokens = {capacity}; lower it, or raise --num-pages or --gpu-memory-utilization"
            )
        self.max_model_len = capacity

    def _compile_step(self, shape: StepShape, state: DeviceState) -> jax.stages.Compiled:
        jitted, arguments = self._program.step(shape, state, self._row_pages)
        return compile_step(jitted.lower(*arguments), shape)

    def _initial_state(self, shapes: DeviceState) -> DeviceState:
        shardings = jax.tree.map(lambda x: x.sharding, shapes)
        make = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), out_shardings=shardings)
        try:
            return jax.block_until_ready(make())
        except jax.errors.JaxRuntimeError as error:
            raise ConfigError(
                f"a KV cache of {self.num_pages} pages, {bytes_per_device(shapes.kv_pages) / 1e9:.1f} GB a device, "
                "cannot be allocated; lower --num-pages or --gpu-memory-utilization"
            ) from error

    def _warm_up(self) -> None:
        """Runs every executable once, on padding only."""
        for shape in tqdm(self.shapes, desc="Running each once", unit="shape", disable=not self._config.progress):
            self._run(StepPlan(groups=[GroupPlan()] * self.num_groups), shape)
        self._write(self._slots.warm_up(self._state.sampling, self.max_num_seqs))

    def _time_decoding(self) -> dict[tuple[int, int], float]:
        """See `Runner.decode_seconds`."""
        seconds: dict[tuple[int, int], float] = {}
        for _ in range(TIMED_RUNS):  # in turn, for a slow moment not to fall on one shape alone
            for shape in self.shapes:
                kind = shape.num_rows, shape.num_drafts
                if shape.num_tokens != kind[0] * (kind[1] + 1) or shape.context > 1 or seconds.get(kind, 0.0) > 1.0:
                    continue
                plan, began = self._trial_plan(*kind), time.perf_counter()
                self._run(plan, shape)
                # All hosts run the same steps, so they have to agree on what takes too long to be run again.
                took = self._config.least_of_hosts("microseconds", int(1e6 * (time.perf_counter() - began))) / 1e6
                seconds[kind] = min(took, seconds.get(kind, took))
        if not any(drafts for _, drafts in seconds):
            raise ConfigError(f"--max-num-batched-tokens {self.max_num_batched_tokens} has no room for a sequence's "
                              f"{self._config.drafts.lengths[0]} drafts and the token before them")  # fmt: skip
        if self._state.expert_load is not None:  # of requests
            load = self._state.expert_load
            self._state = self._state._replace(expert_load=jax.jit(jnp.zeros_like, out_shardings=load.sharding)(load))
        return seconds | {(1, 0): seconds[2, 0]}  # without drafts a lone row has a padded one beside it

    def _trial_plan(self, num_rows: int, num_drafts: int) -> StepPlan:
        """Rows of requests that are not there, in the scratch page."""
        num_tokens = min(1 + num_drafts, self.max_model_len)
        draft = Draft(np.zeros(num_tokens - 1, np.int32)) if num_tokens > 1 else None
        pages = np.zeros(-(-num_tokens // self.page_size), np.int32)
        rows = [RowPlan(request_id="", slot=slot, token_ids=[0] * num_tokens, start=0, num_tokens=num_tokens,
                        page_ids=pages, sampling=SamplingParams(), samples=True, output_index=0, draft=draft)
                for slot in range(min(num_rows, self.max_num_seqs))]  # fmt: skip
        group = GroupPlan(rows=rows, num_decode=0 if draft else len(rows))
        return StepPlan(groups=[group] * self.num_groups, draft_length=num_drafts)

    def _run(self, plan: StepPlan, shape: StepShape) -> None:
        packed = self._packer.pack(plan, shape, self._biased)
        self._state, outputs = self._steps[shape](self._params, self._state, packed)
        jax.tree.map(np.asarray, outputs)

    # Serving

    def dispatch(self, plan: StepPlan) -> InFlight:
        return self.start(plan, self.pack(plan))

    def pack(self, plan: StepPlan) -> PackedStep:
        started = time.perf_counter()
        updates = [(index, update) for index, group in enumerate(plan.groups) for update in group.slot_updates]
        for index, update in updates:
            self._biased[index][update.slot] = is_biased(update)
        drafts = max((row.num_drafts for row in plan.rows), default=0)
        if self.drafts_on_device:
            drafts = max(drafts, plan.draft_length)
        shape = pick_shape(self.shapes, [[row.num_tokens for row in group.rows] for group in plan.groups],
                           self._config.spreading, drafts)
        packed = self._packer.pack(plan, shape, self._biased)
        self._counters["padding_tokens"] += self.num_groups * shape.num_tokens - plan.num_tokens
        self._counters["pack_seconds"] += time.perf_counter() - started
        masks = [(index * (self.max_num_seqs + 1) + row.slot, row.mask)
                 for index, group in enumerate(plan.groups) for row in group.rows if row.mask is not None]  # fmt: skip
        return PackedStep(shape, packed, updates, masks)

    def start(self, plan: StepPlan, step: PackedStep) -> InFlight:
        return InFlight(plan, step.shape, self.execute(step))

    def execute(self, step: PackedStep) -> StepOutputs:
        """What every host does for a step, all in the same order. The outputs are on the device, and not ready yet."""
        started = time.perf_counter()
        for group, update in step.updates:
            slot = group * (self.max_num_seqs + 1) + update.slot
            self._write(self._slots.update(self._state.sampling, slot, update))
        self._write(self._slots.mask(self._state.sampling, step.masks))
        if self._experts is not None:
            self._experts.before_step()
        self._state, outputs = self._steps[step.shape](self._params, self._state, step.packed)
        if self._experts is not None:
            self._experts.after_step(outputs)
        self._counters["dispatch_seconds"] += time.perf_counter() - started
        return outputs

    def fetch(self, handle: InFlight) -> StepResult:
        return read_result(handle, None if self._experts is None else self._experts.news)

    def _write(self, sampling: SamplingState) -> None:
        self._state = self._state._replace(sampling=sampling)

    def stats(self) -> dict[str, float]:
        return {**self._counters, "compile_misses": self._compiles.count}

    def close(self, reason: str = "") -> None:
        """The process' end frees the device."""

    @property
    def drafts_on_device(self) -> bool:
        return self._program.drafter is not None
