"""What scripts hand to the LLM class: vLLM's habits work, and whatever does not is refused in one line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.decoding.speculation.config import SpeculativeConfig
from serving.errors import ConfigError, InvalidRequest
from serving.llm_inputs import list_conversations, list_prompts, list_sampling, read_prompt
from serving.llm_options import engine_config
from serving.request import SamplingParams, StructuredOutputs
from serving.tokenizer.tokenizer import Tokenizer


def test_options():
    assert engine_config({}).mesh == "1x1" and engine_config({"mesh": "8x1"}).mesh == "8x1"
    assert engine_config({"tensor_parallel_size": 4, "data_parallel_size": 2}).mesh == "tensor=4,data=2"
    config = engine_config({"tokenizer": Path("here"), "speculative_config": {"method": "suffix"}, "max_num_seqs": 2})
    assert (config.tokenizer, config.max_num_seqs) == ("here", 2)
    assert config.speculative_config == SpeculativeConfig(method="suffix")
    assert engine_config({"speculative_config": config.speculative_config}).speculative_config is not None


@pytest.mark.parametrize("options, message", [
    ({"dtype": "half"}, r"dtype is 'half', must be .*'float32', 'bfloat16'"),
    ({"scheduling_policy": "lifo"}, "scheduling_policy is 'lifo', must be .*'priority'"),
    ({"max_model_len": "512"}, r"max_model_len is '512', must be int \| None"),
    ({"max_num_seqs": 2.5}, "max_num_seqs is 2.5"),
    ({"enable_eplb": 1}, "enable_eplb is 1, must be bool"),
    ({"mesh": (2, 1)}, r"mesh is \(2, 1\), must be str"),
    ({"mesh": "2x1", "tensor_parallel_size": 2}, "say the same thing: give one"),
    ({"speculative_config": '{"method": "ngram"}'}, "or a dict"),
    ({"trust_remote_code": True}, "LLM has no option 'trust_remote_code'; it has model, .*tensor_parallel_size"),
])  # fmt: skip
def test_bad_options(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        engine_config(options)


def test_prompts(tokenizer: Tokenizer):
    text = (None, [5, 6])
    for given in ([5, 6], [[5, 6]], np.array([5, 6]), {"prompt_token_ids": [5, 6]}, [{"prompt_token_ids": (5, 6)}]):
        assert [read_prompt(one, tokenizer) for one in list_prompts(given)] == [text]  # type: ignore[arg-type]
    for given in ("Hello", ["Hello"], {"prompt": "Hello"}):
        assert [read_prompt(one, tokenizer)[0] for one in list_prompts(given)] == ["Hello"]  # type: ignore[arg-type]
    assert list_prompts([]) == []
    for bad in (None, 7, [None], {}, {"prompt": None}, ["Hello", 5], [5, "Hello"], {"prompt_token_ids": "Hello"},
                b"Hello", [b"Hello"]):
        with pytest.raises(InvalidRequest, match="is neither text, nor token ids, nor a dict"):
            for one in list_prompts(bad):  # type: ignore[arg-type]
                read_prompt(one, tokenizer)


def test_sampling_parameters():
    given: Any = dict(temperature=np.float64(0.5), max_tokens=np.int64(3), allowed_token_ids=np.arange(2), stop=None,
                      stop_token_ids=None, bad_words=None, logit_bias=None, structured_outputs={"choice": ["a", "b"]})
    same = SamplingParams(temperature=0.5, max_tokens=3, allowed_token_ids=(0, 1),
                          structured_outputs=StructuredOutputs(choice=("a", "b")))  # fmt: skip
    assert list_sampling(SamplingParams(**given), 2) == [same, same]
    assert list_sampling([same], 1) == [same] and list_sampling(None, 1) == [SamplingParams()]


@pytest.mark.parametrize("given, message", [
    ({"temperature": 0}, "must be SamplingParams"),
    (0.5, "must be SamplingParams"),
    ([SamplingParams()] * 3, "3 sampling_params for 2 prompts"),
    (SamplingParams(temperature="0.5"), "sampling_params.temperature: Expected `float`, got `str`"),  # type: ignore
    (SamplingParams(logit_bias={"5": 1}), "sampling_params.logit_bias: Expected `int`, got `str`"),  # type: ignore
    (SamplingParams(stop=["a", 5]), r"sampling_params.stop\[1\]: Expected `str`"),  # type: ignore
    (SamplingParams(structured_outputs={"choise": []}), "unknown field `choise`"),  # type: ignore
    (SamplingParams(structured_outputs=StructuredOutputs(choice=(1, 2))), r"outputs.choice\[0\]: "),  # type: ignore
])  # fmt: skip
def test_bad_sampling_parameters(given: Any, message: str):
    with pytest.raises(InvalidRequest, match=message):
        list_sampling(given, 2)


def test_conversations():
    turn = {"role": "user", "content": [{"type": "text", "text": "Hello!"}]}
    assert list_conversations([turn]) == list_conversations([[turn]]) == [[turn]]
    assert list_conversations([]) == []
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    for bad, message in (("Hello!", "'Hello!' is no conversation"), ([turn, "Hello!"], "is no conversation"),
                         ([image], r"messages\[0\].content has .*image_url.*may only be text")):  # fmt: skip
        with pytest.raises(InvalidRequest, match=message):
            list_conversations(bad)  # type: ignore[arg-type]
