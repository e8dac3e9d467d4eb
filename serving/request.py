"""What crosses the line between the front ends and the engine core. Everything here is plain data (msgspec),
so the same structs are the in-process API and, encoded with MessagePack, the wire format.

A front end validates, tokenizes and splits a request of n completions into n `EngineRequest`s. The core answers
with one `StepOutput` a step for each front end, which carries every sequence's new tokens.

Who stops a sequence: the core on token ids (eos, `stop_token_ids`), on `max_tokens` and on the context length; the
front end on stop strings (only it has text), by truncating the output and aborting the sequence.
"""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the output has to be, with vLLM's names (`StructuredOutputsParams`). Exactly one of the first six is set."""

    json: str | dict | bool | None = None  # a JSON schema, or its text
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None  # Lark or EBNF
    json_object: bool | None = None  # True: any JSON object
    structural_tag: str | dict | None = None
    # How JSON is spaced. None: as Python's json.dumps does. True: not at all. False: as the model likes.
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None  # objects have the properties that a schema names, no others
    whitespace_pattern: str | None = None  # a regular expression: what may stand where JSON allows whitespace
    source: str = ""  # the field it came as, for errors; empty: structured_outputs, by the name of what is set

    def __post_init__(self) -> None:
        if isinstance(self.choice, list):
            msgspec.structs.force_setattr(self, "choice", tuple(self.choice))


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to sample and when to stop, with vLLM's names, meanings and, but for `max_tokens`, defaults. Ranges are
    checked by `validate` in `serving/validation.py`; the core relies on it having been called."""

    n: int = 1
    max_tokens: int | None = None  # None: up to the context length (vLLM: 16)
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # int64; None: drawn from entropy by the front end
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None  # number of top log-probabilities beside the chosen one's, 0 to 20
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None  # keep the last k prompt tokens; -1: the context length
    structured_outputs: StructuredOutputs | None = None  # text: the engine sees `EngineRequest.grammar`

    def __post_init__(self) -> None:
        """Lists become tuples, one stop string a tuple of it, None an empty one: scripts for vLLM give all of them."""
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            value = getattr(self, name)
            if isinstance(value, list) or (value is None and name != "allowed_token_ids"):
                msgspec.structs.force_setattr(self, name, tuple(value or ()))
        if self.logit_bias is None:
            msgspec.structs.force_setattr(self, "logit_bias", {})
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))

    @property
    def is_penalized(self) -> bool:
        """What was sampled before counts."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. `request_id` is unique among live requests (the front end makes it so)."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams  # n is 1, max_tokens and seed are set, text-only fields may be ignored
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""  # of the output, in llguidance's notation; empty: anything goes
    grammar_source: str = ""  # the request's field that it came as, for errors
    priority: int = 0  # lower runs first (only with the priority policy)
    cache_salt: str = ""  # prefix-cache namespace
    group_id: str = ""  # shared by the n sequences of one request, which share prompt pages even without a prefix cache
    arrival_time: float = 0.0  # time.time() at the front end


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, of the raw model distribution (before penalties and temperature)."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top_ids: list[int]
    top_logprobs: list[float]


class TokenEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step did for one sequence. After an event with a `finish_reason` nothing follows for that id."""

    request_id: str
    new_token_ids: list[int] = []
    logprobs: list[Logprobs] | None = None  # one entry a new token, when asked for
    prompt_logprobs: list[Logprobs | None] | None = None  # once, with the first token; the first entry is None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it (it is the last of new_token_ids); None for eos
    num_cached_tokens: int = 0  # prompt tokens served from the prefix cache, on the first event
    queue_time: float = 0.0  # seconds between arrival and first schedule, on the first event
    draft_tokens: int = 0  # drafts of it that the step verified
    accepted_tokens: int = 0  # of those
    error: str = ""  # with finish_reason "error"
    error_param: str = ""  # the request's field that is to blame for it, if one is


class GroupStats(msgspec.Struct, kw_only=True):
    """Of one data group."""

    num_running: int = 0
    kv_cache_usage: float = 0.0  # held pages / total pages


MOST_EXPERTS_TOLD = 256  # of all layers together; a message and a metric for each of more would be too much


class ExpertStats(msgspec.Struct, kw_only=True):
    """Of a model's layers that have experts, as last read from the devices."""

    layers: list[int]  # their numbers in the model
    balancedness: list[float]  # mean over greatest load of the devices, within the window
    tokens: list[list[int]]  # counter, by layer and expert; empty where they are more than MOST_EXPERTS_TOLD
    layers_moved: int = 0  # counter: times that a layer's experts got new places


class EngineStats(msgspec.Struct, kw_only=True):
    """The engine's books after a step. Counters only grow; the front end turns them into metrics."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # held pages / total pages
    groups: list[GroupStats] = []  # the same by data group; empty before the first step
    prefix_cache_queries: int = 0  # counter, tokens
    prefix_cache_hits: int = 0  # counter, tokens
    num_preemptions: int = 0  # counter
    prompt_tokens: int = 0  # counter
    prompt_tokens_cached: int = 0  # counter
    generation_tokens: int = 0  # counter
    forced_tokens: int = 0  # counter: output tokens that a grammar left no choice about, appended without sampling
    grammar_seconds: float = 0.0  # counter: on the engine's thread
    num_drafts: int = 0  # counter: rows that had drafts to verify
    draft_tokens: int = 0  # counter
    accepted_tokens: int = 0  # counter
    accepted_per_position: list[int] = []  # counters: of the first draft, the second, ... (in a tree: by depth)
    draft_length: int = 0  # drafts a row may have in this step; 0: none
    compile_misses: int = 0  # counter; must stay 0 after start
    step_seconds: dict[str, float] = {}  # counter by part: schedule, pack, dispatch, device, fetch
    steps: int = 0  # counter
    batch_tokens: int = 0  # counter: real tokens in steps
    batch_padding: int = 0  # counter: padding tokens in steps
    experts: ExpertStats | None = None
    iteration_tokens: int = 0  # real tokens of this step


class StepOutput(msgspec.Struct, kw_only=True, tag=True):
    """The one message of a step to a front end."""

    events: list[TokenEvent]
    stats: EngineStats


class EngineInfo(msgspec.Struct, kw_only=True):
    """What the core tells a front end once it is ready. Sequences, batched tokens and pages are of each data group."""

    max_model_len: int
    vocab_size: int
    num_groups: int = 1
    max_num_seqs: int
    max_num_batched_tokens: int
    num_pages: int
    page_size: int
    dtype: str
    kv_cache_dtype: str
    attention_backend: str
    mesh: str
    model_family: str
    num_parameters: int
    # How drafts are accepted. "typical": the output does not follow the model's distribution.
    acceptance: Literal["exact", "typical"] = "exact"
