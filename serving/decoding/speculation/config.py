"""What `--speculative-config` may say: vLLM's keys where it has them, checked at birth."""

import ast
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from serving.decoding.speculation.token_trees import PUBLISHED
from serving.errors import ConfigError

Method = Literal["ngram", "suffix", "draft_model", "medusa", "eagle", "eagle3", "mtp", "dflash"]
ON_HOST = ("ngram", "suffix")
MOST_DRAFTS = 64  # tokens of a row; a tree of EAGLE-2's size fits
MOST_LENGTHS = 4  # each is one more set of compiled steps

FLAG = "--speculative-config"
# Keys that mean something to some methods only. All others mean something to all.
METHODS_OF: dict[str, tuple[Method, ...]] = {
    "model": ("draft_model", "medusa", "eagle", "eagle3", "mtp", "dflash"),
    "prompt_lookup_max": ("ngram",),
    "prompt_lookup_min": ("ngram",),
    "suffix_decoding_max_tree_depth": ("suffix",),
    "suffix_decoding_max_cached_requests": ("suffix",),
    "suffix_decoding_max_spec_factor": ("suffix",),
    "suffix_decoding_min_token_prob": ("suffix",),
    "suffix_decoding_tree": ("suffix",),
    "draft_sample_method": ("draft_model", "medusa", "eagle", "eagle3", "mtp", "dflash"),
    "rejection_sample_method": ("medusa",),
    "posterior_threshold": ("medusa",),
    "posterior_alpha": ("medusa",),
    "speculative_token_tree": ("medusa", "eagle", "eagle3"),
    "eagle_topk": ("eagle", "eagle3"),
    "eagle_num_steps": ("eagle", "eagle3"),
}
ONLY_BEST = ("medusa", "eagle", "eagle3")  # whose drafts are the best tokens, never drawn
NEEDS_MODEL = ("draft_model", "medusa", "eagle", "eagle3", "dflash")

TokenTree = tuple[tuple[int, ...], ...]  # paths of ranks: (0, 2) is the third guess after the best first one


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made, how many a row has at most, and how they are judged. In a tree all its tokens count."""

    method: Method
    num_speculative_tokens: int | None = None  # None: suffix_decoding_max_tree_depth, or the size of the tree
    model: str | None = None  # path of the draft model or of the heads; mtp: None, the target's own
    # (fewest, most sequences of a step, drafts): gaps go on with the entry before, the first and last one reach on
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None
    adaptive: bool = True  # choose the length from measured acceptance and step times; with a table, it decides

    prompt_lookup_max: int | None = None  # tokens that must match; None: as the other bound, neither: 2 to 5
    prompt_lookup_min: int | None = None

    suffix_decoding_max_tree_depth: int = 24  # tokens of context and drafts together
    suffix_decoding_max_cached_requests: int = 10000  # 0: past outputs are not kept
    suffix_decoding_max_spec_factor: float = 1.0  # most drafts for each token that matches
    suffix_decoding_min_token_prob: float = 0.1  # of all drafts up to it
    suffix_decoding_tree: bool = False  # the likeliest continuations instead of one

    # Of sequences with a temperature, where drafts may be drawn; see docs/speculation.md. coupled: what a seed gives
    # stays the same.
    draft_sample_method: Literal["greedy", "probabilistic", "coupled"] = "coupled"
    # typical: Medusa's acceptance. It changes what is sampled: the output no longer follows the model's distribution.
    rejection_sample_method: Literal["standard", "typical"] = "standard"
    posterior_threshold: float = 0.09  # typical: epsilon
    posterior_alpha: float = 0.3  # typical: delta

    speculative_token_tree: TokenTree | None = None  # static
    eagle_topk: int = 1  # more: a dynamic tree, so many children of a token
    eagle_num_steps: int | None = None  # its depth; None: 6, or as many as there are drafts

    def __post_init__(self) -> None:
        for field in fields(self):
            value, expected = getattr(self, field.name), typing.get_type_hints(type(self))[field.name]
            if not _is_a(value, expected):
                raise _error(field.name, value, f"must be {_describe(expected)}")
            if value != field.default and self.method not in METHODS_OF.get(field.name, (self.method,)):
                raise _error(field.name, value, f'has no meaning with "method": "{self.method}"; it is for '
                             + ", ".join(METHODS_OF[field.name]))  # fmt: skip
        self._check_ranges()
        self._check_together()

    @classmethod
    def parse(cls, text: str) -> "SpeculativeConfig":
        """From a flag's JSON."""
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{FLAG} {text!r} is not JSON: {error}") from error
        if not isinstance(given, dict):
            raise ConfigError(f'{FLAG} {text!r} must be an object, as {{"method": "ngram", ...}}')
        return cls.of(given)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "SpeculativeConfig":
        """From keys and values as JSON has them."""
        known = [field.name for field in fields(cls)]
        unknown = [key for key in given if key not in known]
        if unknown:
            raise ConfigError(f"{FLAG} has no key {unknown[0]!r}; it has {', '.join(known)}")
        if "method" not in given:
            raise ConfigError(f'{FLAG} needs "method", one of {", ".join(get_args(Method))}')
        values: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        if isinstance(table := values.get("num_speculative_tokens_per_batch_size"), dict | list):
            values["num_speculative_tokens_per_batch_size"] = _parse_table(table)
            if values.get("adaptive"):
                raise _error("adaptive", True, "but num_speculative_tokens_per_batch_size decides: leave one out")
        if isinstance(tree := values.get("speculative_token_tree"), str | list):
            values["speculative_token_tree"] = _parse_tree(tree)
        for field in fields(cls):
            if type(values.get(field.name)) is int and type(field.default) is float:
                values[field.name] = float(str(values[field.name]))  # by its digits: too many are infinity
        return cls(**values)

    @property
    def on_host(self) -> bool:
        return self.method in ON_HOST

    @property
    def has_tree(self) -> bool:
        """Drafts may be trees."""
        return self.suffix_decoding_tree or self.speculative_token_tree is not None or self.eagle_topk > 1

    @property
    def rejects(self) -> bool:
        """Drafts are verified by rejection, which needs the distribution that each was drawn from."""
        return self.draft_sample_method == "probabilistic"

    @property
    def chooses_by_goodput(self) -> bool:
        return self.adaptive and self.num_speculative_tokens_per_batch_size is None

    @property
    def may_be_off(self) -> bool:
        """With some number of sequences."""
        table = self.num_speculative_tokens_per_batch_size
        return self.adaptive if table is None else any(k == 0 for _, _, k in table)

    @cached_property
    def most(self) -> int:
        """Drafts of a row."""
        if self.speculative_token_tree is not None:
            return len(self.speculative_token_tree)
        if self.num_speculative_tokens is None:
            return self.suffix_decoding_max_tree_depth
        return self.num_speculative_tokens

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The numbers of drafts to compile steps for, ascending, without 0."""
        if self.num_speculative_tokens_per_batch_size is not None:
            return tuple(sorted({k for _, _, k in self.num_speculative_tokens_per_batch_size if k}))
        # A static tree is drafted whole, and a block as it was trained.
        if not self.adaptive or self.speculative_token_tree is not None or self.method == "dflash":
            return (self.most,)
        return tuple(sorted({-(-self.most // part) for part in (1, 3, 9)}))

    @property
    def lookup(self) -> tuple[int, int]:
        """Fewest and most tokens that an n-gram's match has."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        return least or most or 2, most or least or 5

    def _check_ranges(self) -> None:
        at_least = {
            "num_speculative_tokens": 1, "prompt_lookup_max": 1, "prompt_lookup_min": 1,
            "suffix_decoding_max_tree_depth": 2, "suffix_decoding_max_cached_requests": 0, "eagle_topk": 1,
            "eagle_num_steps": 1,
        }  # fmt: skip
        at_most = {"num_speculative_tokens": MOST_DRAFTS, "prompt_lookup_max": 32, "prompt_lookup_min": 32,
                   "suffix_decoding_max_tree_depth": MOST_DRAFTS}  # fmt: skip
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= at_most.get(name, value):
                bounds = f"in {least} to {at_most[name]}" if name in at_most else f"at least {least}"
                raise _error(name, value, f"must be {bounds}")
        if not 0 < self.suffix_decoding_max_spec_factor <= MOST_DRAFTS:
            raise _error("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor,
                         f"must be over 0 and at most {MOST_DRAFTS}")  # fmt: skip
        for name in ("suffix_decoding_min_token_prob", "posterior_threshold", "posterior_alpha"):
            if not 0 <= getattr(self, name) <= 1:
                raise _error(name, getattr(self, name), "must be in 0 to 1")

    def _check_together(self) -> None:
        if self.method in NEEDS_MODEL and not self.model:
            raise ConfigError(f'{FLAG}: "method": "{self.method}" needs "model", the path of what drafts')
        if self.draft_sample_method == "probabilistic" and self.method in ONLY_BEST:
            rule = f'but "method": "{self.method}" drafts the best tokens: give "greedy", or leave it out'
            raise _error("draft_sample_method", "probabilistic", rule)
        least, most = self.lookup
        if least > most:
            raise _error("prompt_lookup_min", least, f"must be at most prompt_lookup_max, {most}")
        tree, table = self.speculative_token_tree, self.num_speculative_tokens_per_batch_size
        if tree is not None:
            _check_tree(tree, self.num_speculative_tokens)
        elif self.num_speculative_tokens is None and self.method != "suffix":
            raise ConfigError(f'{FLAG}: "method": "{self.method}" needs "num_speculative_tokens", the most drafts a '
                              "sequence may have in a step; 4 is a good start")  # fmt: skip
        if tree is not None and self.eagle_topk > 1:
            raise _error("eagle_topk", self.eagle_topk, "and speculative_token_tree are two kinds of trees: give one")
        if self.eagle_num_steps is not None and self.eagle_topk == 1:
            raise _error("eagle_num_steps", self.eagle_num_steps, "is the depth of a tree: give eagle_topk over 1 too")
        if self.eagle_num_steps is not None and self.eagle_num_steps > self.most:
            raise _error("eagle_num_steps", self.eagle_num_steps, f"must be at most the {self.most} drafts of a tree")
        if table is not None:
            if tree is not None:
                raise _error("num_speculative_tokens_per_batch_size", table, "has no use: a static tree is one size")
            _check_table(table, self.most)


def _error(key: str, value: object, rule: str) -> ConfigError:
    shown = json.dumps(value, default=str)
    return ConfigError(f"{FLAG}: {key} is {shown if len(shown) <= 80 else shown[:77] + '...'}, {rule}")


def _is_a(value: object, expected: Any) -> bool:
    if get_origin(expected) is Literal:
        return isinstance(value, str) and value in get_args(expected)
    if isinstance(expected, UnionType):
        return any(_is_a(value, one) for one in get_args(expected))
    if get_origin(expected) is tuple:
        return isinstance(value, tuple)  # of what: `_parse_table` and `_parse_tree` see to it
    return type(value) is expected  # True is no number, though Python thinks so


def _describe(expected: Any) -> str:
    if get_origin(expected) is Literal:
        return "one of " + ", ".join(get_args(expected))
    if isinstance(expected, UnionType):
        return " or ".join(_describe(one) for one in get_args(expected) if one is not type(None))
    if get_origin(expected) is tuple:
        return "a list of paths, as [[0], [1], [0, 0]]" if expected == TokenTree else 'an object, as {"1-16": 3}'
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[expected]


def _parse_table(table: dict | list) -> tuple[tuple[int, int, int], ...]:
    """{"1-16": 3, "64": 0}, or [[1, 16, 3], [64, 64, 0]]."""
    name = "num_speculative_tokens_per_batch_size"
    entries: list[tuple[int, int, int]] = []
    items: list[Any] = list(table.items()) if isinstance(table, dict) else table
    for item in items:
        try:
            if isinstance(table, dict):
                first, _, last = item[0].partition("-")
                entry = int(first), int(last or first), item[1]
            else:
                entry = item[0], item[1], item[2]
        except (TypeError, ValueError, IndexError):
            raise _error(name, table, f'must have keys as "1-16" or "64", not {json.dumps(item)}') from None
        if not all(type(value) is int for value in entry) or not 1 <= entry[0] <= entry[1] or entry[2] < 0:
            raise _error(name, table, f"must have ranges of 1 sequence and more with 0 drafts and more, not "
                         f"{json.dumps(item)}")  # fmt: skip
        entries.append(entry)
    return tuple(sorted(entries))


def _check_table(table: tuple[tuple[int, int, int], ...], most: int) -> None:
    name = "num_speculative_tokens_per_batch_size"
    for (_, last, _), (first, _, _) in zip(table, table[1:], strict=False):
        if first <= last:
            raise _error(name, table, f"must have ranges that do not overlap: {first} is in two")
    lengths = sorted({k for _, _, k in table if k})
    if not lengths or lengths[-1] > most:
        raise _error(name, table, f"must have drafts of 1 to num_speculative_tokens, {most}, in some range")
    if len(lengths) > MOST_LENGTHS:
        raise _error(name, table, f"may have {MOST_LENGTHS} numbers of drafts beside 0 (each is compiled): {lengths}")


def _parse_tree(tree: str | list) -> TokenTree:
    """Lists, or a text as vLLM has it: "[(0,), (0, 0)]", or the name of a published tree."""
    try:
        published = PUBLISHED.get(tree) if isinstance(tree, str) else None
        parsed = published or (ast.literal_eval(tree) if isinstance(tree, str) else tree)
        paths = tuple(tuple(path) for path in parsed)
    except (TypeError, ValueError, SyntaxError):
        raise _error("speculative_token_tree", tree, "must be a list of paths, as [[0], [1], [0, 0]], or one of "
                     + ", ".join(PUBLISHED)) from None  # fmt: skip
    if not paths or not all(path and all(type(rank) is int and rank >= 0 for rank in path) for path in paths):
        raise _error("speculative_token_tree", tree, "must have paths of ranks, each 0 and more")
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def _check_tree(tree: TokenTree, num_tokens: int | None) -> None:
    known = {()} | set(tree)
    name = "speculative_token_tree"
    if len(known) != len(tree) + 1:
        raise _error(name, tree, "must have each path once")
    if len(tree) > MOST_DRAFTS:
        raise _error(name, tree, f"may have {MOST_DRAFTS} paths, not {len(tree)}")
    if num_tokens not in (None, len(tree)):
        raise _error("num_speculative_tokens", num_tokens, f"but speculative_token_tree has {len(tree)}: leave one out")
    for path in tree:
        if path[:-1] not in known:
            raise _error(name, tree, f"must have the start of every path: {list(path[:-1])} is missing")
