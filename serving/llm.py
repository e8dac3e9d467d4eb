"""`LLM`: the engine in this process, for notebooks and scripts.

    llm = LLM()                                             # the default model; or LLM(model="path/to/model")
    llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text
    llm.chat([{"role": "user", "content": "Hello!"}])

It goes through the same pipeline as the servers: validation, the engine client, detokenizing, stop strings.
"""

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from os import PathLike, fspath
from typing import Any, Literal, TypeVar

from tqdm import tqdm

from checkpoints.default_model import default_model_path
from serving.api.generation import generate
from serving.api.service import Service
from serving.build import build_core
from serving.config import ServerConfig
from serving.engine.in_process import InProcessClient
from serving.errors import EngineDead, InvalidRequest
from serving.llm_inputs import Message, Prompt, list_conversations, list_prompts, list_sampling, read_prompt
from serving.llm_options import engine_config
from serving.metrics import Metrics
from serving.request import Logprobs, SamplingParams, StructuredOutputs
from serving.tokenizer.load import load_tokenizer
from serving.validation import to_engine_requests

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputs"]

_T = TypeVar("_T")


@dataclass(kw_only=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] | None = None
    finish_reason: Literal["stop", "length", "abort", "error"] | None = None
    stop_reason: int | str | None = None


@dataclass(kw_only=True)
class RequestOutput:
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached_tokens: int = 0


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Until it is stopped."""
    loop.run_forever()
    loop.close()


class LLM:
    """Keyword arguments are the fields of `serving.config.EngineConfig`, or `tensor_parallel_size` and the like instead
    of `mesh`; `speculative_config`, `eplb_config` and `structured_outputs_config` may be dicts. Raises ConfigError when
    the model cannot be served as asked. Use it as a context manager, or `close` it, to free the device memory at
    once."""

    def __init__(self, model: str | PathLike[str] = "", *, progress: bool = True, **options: Any):
        config = engine_config(options)
        model = fspath(model) or str(default_model_path(progress))
        config = replace(config, model=model)
        runner, info, eos_ids, compile_grammar = build_core(config, progress=progress)
        client = InProcessClient(runner, info, eos_ids, config, compile_grammar)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="llm-events", daemon=True)
        self._thread.start()
        self._closing = threading.Lock()
        self._ending: Future[None] | None = None
        name = model.rstrip("/").rsplit("/", 1)[-1]
        self.service = Service(
            engine=client,
            tokenizer=load_tokenizer(config.tokenizer or model),
            config=ServerConfig(engine=config),
            model_name=name,
            metrics=Metrics(name, info, lambda: client.stats),
            version=version("pageloom"),
            start_time=time.time(),
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes every prompt; results are in the prompts' order. One SamplingParams for all, or one each.

        Without `max_tokens` a prompt runs until the model stops or its context is full. Raises InvalidRequest for a
        bad prompt or parameter, before anything runs.
        """
        listed = list_prompts(prompts)
        tokenizer, jobs = self.service.tokenizer, []
        for prompt, sampling in zip(listed, list_sampling(sampling_params, len(listed)), strict=True):
            text, ids = read_prompt(prompt, tokenizer)
            requests = to_engine_requests(ids, sampling, self.service.limits, tokenizer)
            output = RequestOutput(prompt=text, prompt_token_ids=requests[0].prompt_token_ids, outputs=[])
            jobs.append((output, requests))
        return self._wait(self._run_all(jobs, use_tqdm))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Completes one conversation or several, through the model's chat template or the one given."""
        tokenizer = self.service.tokenizer
        if tools and "tools" not in tokenizer.template_for(chat_template, True):
            raise InvalidRequest("tools are not used by this model's chat template: give a chat_template that shows "
                                 "them", "tools")  # fmt: skip
        render = partial(
            tokenizer.apply_chat_template,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **chat_template_kwargs or {},
        )
        texts = [render(one) for one in list_conversations(messages)]
        prompts: list[Prompt] = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        results = self.generate(prompts, sampling_params, use_tqdm=use_tqdm)
        for text, result in zip(texts, results, strict=True):
            result.prompt = text
        return results

    def close(self) -> None:
        """Calls of other threads that are under way end now, with what they have."""
        with self._closing:
            if self._ending is None:
                self._ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
                # Called in the loop's thread, or, where it has ended already, in this one: then it must wake the loop.
                self._ending.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        self._ending.result()
        self._thread.join()

    async def _end(self) -> None:
        await self.service.engine.shutdown(0.0)
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*calls, return_exceptions=True)  # their threads wait

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        with self._closing:
            if self._ending is not None:
                work.close()
                raise EngineDead("this LLM was closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    async def _run_all(self, jobs: Iterable[tuple[RequestOutput, list]], use_tqdm: bool) -> list[RequestOutput]:
        jobs = list(jobs)
        with tqdm(total=len(jobs), desc="Prompts", unit="prompt", disable=not (use_tqdm and jobs)) as bar:

            async def run(output: RequestOutput, requests: list) -> RequestOutput:
                await self._run(output, requests)
                bar.update()
                return output

            tasks = [asyncio.ensure_future(run(*job)) for job in jobs]
            try:
                return await asyncio.gather(*tasks)
            finally:  # after an error or an interrupt: end the others, so that they free their pages
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, output: RequestOutput, requests: list) -> None:
        sampling = requests[0].sampling
        output.outputs = [
            CompletionOutput(index=i, logprobs=None if sampling.logprobs is None else []) for i in range(len(requests))
        ]
        async with aclosing(generate(self.service, requests, interval=None)) as deltas:
            async for delta in deltas:
                one = output.outputs[delta.sequence]
                one.text += delta.text
                one.token_ids += delta.token_ids
                if one.logprobs is not None:
                    one.logprobs += delta.logprobs
                one.finish_reason, one.stop_reason = delta.finish_reason, delta.stop_reason
                output.num_cached_tokens = max(output.num_cached_tokens, delta.num_cached_tokens)
                output.prompt_logprobs = delta.prompt_logprobs or output.prompt_logprobs
