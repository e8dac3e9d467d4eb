"""A smaller model of the target's vocabulary, of any family and format that a target may have."""

from contextlib import closing
from functools import partial

from checkpoints.open import Checkpoint, open_checkpoint
from model.build import model_shapes
from model.families.registry import may_be_left_over, param_sources, read_config
from model.speculative.draft_model import DraftModel
from model.transformer import with_params
from serving.decoding.speculation.config import FLAG, SpeculativeConfig
from serving.drafters.loading import Surroundings, naming_the_flag
from serving.errors import ConfigError
from serving.tokenizer.load import load_tokenizer
from serving.weights import read_params


def load_draft_model(config: SpeculativeConfig, around: Surroundings) -> DraftModel:
    """Raises ConfigError."""
    target = around.target.config
    with naming_the_flag(), closing(open_checkpoint(str(config.model))) as checkpoint:
        drafter = read_config(checkpoint.config, around.max_model_len)
        if drafter.vocab_size != target.vocab_size:
            raise ConfigError(f"{FLAG}: the draft model {checkpoint.path} has {drafter.vocab_size} tokens, the target "
                              f"{target.vocab_size}; it must have the target's vocabulary")  # fmt: skip
        _check_tokenizers(around, checkpoint)
        rules, kernels = around.rules_and_kernels(drafter)
        model = model_shapes(drafter, rules, kernels, around.dtype)
        params = read_params(model, rules, checkpoint.source or checkpoint.path, partial(param_sources, drafter),
                             ignore=may_be_left_over(drafter), progress=around.progress)  # fmt: skip
    return DraftModel(with_params(model, params), kernels, around.spare_pages(config.most), max_drafts=config.most,
                      sampling=config.draft_sample_method)  # fmt: skip


def _check_tokenizers(around: Surroundings, checkpoint: Checkpoint) -> None:
    """Ids must mean the same. Weights without a tokenizer say nothing about that."""
    try:
        ours, theirs = load_tokenizer(around.tokenizer), load_tokenizer(checkpoint.path)
    except ConfigError:
        return
    for token in range(min(ours.vocab_size, theirs.vocab_size)):
        if (text := theirs.token_text(token)) != ours.token_text(token):
            raise ConfigError(f"{FLAG}: token {token} of the draft model {checkpoint.path} is {text!r}, of the target "
                              f"{ours.token_text(token)!r}; it must have the target's vocabulary")  # fmt: skip
