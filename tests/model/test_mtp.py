"""DeepSeek-V3's layer for multi-token prediction, against logits that torch computed without a cache."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.dispatch import BySize, GatherTokens
from model.expert_options import ExpertOptions
from model.speculative.drafter import Settled
from model.speculative.mtp import MTP, mtp_config
from model.transformer import Transformer
from serving.decoding.speculation.config import SpeculativeConfig
from serving.drafters.loading import Surroundings
from serving.drafters.mtp import load_mtp
from serving.errors import ConfigError
from tests.model.harness import GOLDENS, batch, kv_pages, load, shapes_of
from tests.model.sampling_cases import rows
from tests.model.speculators import write_with_mtp
from tests.tolerances import LOGITS_FLOAT32

PAGE, ROWS, DRAFTS, LONG = 8, 2, 3, 48


def drafter_of(target: Transformer, folder: Path) -> MTP:
    config = SpeculativeConfig.of({"method": "mtp", "num_speculative_tokens": DRAFTS})
    return load_mtp(config, Surroundings(
        target=target, dtype=jnp.dtype(jnp.float32), page_size=PAGE, max_num_seqs=1, max_model_len=None,
        attention_backend="xla", progress=False, path=str(folder)))  # fmt: skip


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, MTP]:
    folder = write_with_mtp(tmp_path_factory.mktemp("mtp"))
    target = load(folder)
    return target, drafter_of(target, folder)


@pytest.fixture(scope="module")
def run(both):
    """(the target, the layer), compiled."""
    target, mtp = both
    return jax.jit(lambda pages, step: target(pages, step)[:2]), jax.jit(
        lambda pages, step, states: mtp(pages, step, states, target.embedding[...]))  # fmt: skip


def golden() -> tuple[list[int], np.ndarray]:
    arrays = np.load(GOLDENS / "deepseek-v3-mtp" / "mtp.npz")
    return arrays["tokens"].tolist(), arrays["logits"]


def test_logits_are_torchs(both, run):
    target, mtp = both
    tokens, expected = golden()
    step = batch([(tokens[:-1], 0)], num_tokens=LONG, num_rows=ROWS)
    states, _ = run[0](kv_pages(target), step)
    shifted = step._replace(tokens=jnp.zeros(LONG, jnp.int32).at[: len(tokens) - 1].set(jnp.asarray(tokens[1:])))
    out, _ = run[1](jnp.zeros(mtp.state_shapes(17).shape), shifted, states)
    np.testing.assert_allclose(target.logits(out[: len(expected)]), expected, atol=LOGITS_FLOAT32)


def dense_drafts(target: Transformer, empty: jax.Array, run, states: jax.Array, tokens: list[int], end: int):
    """What follows token `end`, everything computed anew for each guess. states: the target's, of all tokens."""
    states, following = list(states[:end]), tokens[1 : end + 1]
    for _ in range(DRAFTS):
        step = batch([(following, 0)], num_tokens=LONG, num_rows=ROWS)
        padded = jnp.zeros((LONG, len(states[0]))).at[: len(states)].set(jnp.stack(states))
        out, _ = run(empty, step, padded)
        state = out[len(states) - 1]
        states, following = [*states, state], [*following, int(target.logits(state[None])[0].argmax())]
    return following[-DRAFTS:]


def test_drafts_whatever_was_chunked_or_rejected(both, run):
    target, mtp = both
    tokens, logits = golden()
    shape = mtp.state_shapes(17)
    state = jnp.full(shape.shape, jnp.nan, shape.dtype)  # what was never written must not count
    pages = kv_pages(target)
    all_states, _ = run[0](kv_pages(target), batch([(tokens, 0)], num_tokens=LONG, num_rows=ROWS))
    propose = jax.jit(partial(mtp.propose, num_drafts=DRAFTS, embedding=target.embedding[...],
                              output_matrix=target.output_matrix))  # fmt: skip
    for start, known, rejected in ((0, 11, 0), (11, 10, 0), (21, 1, 2), (22, 4, 0), (26, 1, 3), (27, 9, 1)):
        end = start + known
        wrong = [(token + 1) % 128 for token in tokens[end:][:rejected]]
        step = batch([(tokens[start:end] + wrong, start)], num_tokens=LONG, num_rows=ROWS)
        used = -(-step.kv_lens[:, None] // PAGE)  # a row has the pages of this step's tokens, no more
        step = step._replace(page_table=jnp.where(jnp.arange(step.page_table.shape[1]) < used, step.page_table, 0))
        states, pages = run[0](pages, step)
        following = np.pad(np.array(tokens[start + 1 : end + 1], np.int32), (0, LONG - known))
        settled = Settled(features=states, next_tokens=jnp.asarray(following), last=jnp.array([known - 1, 0]),
                          lens=jnp.array([end, 0]), token=jnp.array([tokens[end], 0]),
                          samples=jnp.array([True, False]))  # fmt: skip
        drafts, state = propose(state, settled, step, rows(*[{"temperature": 0.0}] * ROWS))
        got = drafts.tokens[0].tolist()
        assert got[0] == logits[end - 1].argmax()
        assert got == dense_drafts(target, jnp.zeros(shape.shape), run[1], all_states, tokens, end)


def test_experts_that_divide_with_redundant_ones_only(both):
    """8 and one more over 3 devices: the layer has 8, which every data group holds then."""
    config = both[0].config
    target = shapes_of(config, "tensor=1,data=3")
    options = ExpertOptions(parallel=True, redundant=1)
    around = Surroundings(target=target, dtype=jnp.dtype(jnp.float32), page_size=PAGE, max_num_seqs=1, experts=options,
                          max_model_len=None, attention_backend="xla", progress=False)  # fmt: skip
    _, kernels = around.rules_and_kernels(mtp_config(config))
    assert kernels.experts is not None and kernels.experts.dispatch == GatherTokens(axes=(), num_places=8, held=8)
    even = replace(around, target=shapes_of(config, "tensor=1,data=4"), experts=replace(options, redundant=4))
    _, kernels = even.rules_and_kernels(mtp_config(config))
    assert kernels.experts is not None and isinstance(kernels.experts.dispatch, BySize)


def test_a_model_without_the_layer_is_refused(both):
    target, _ = both
    with pytest.raises(ConfigError, match="deepseek-v3 has none"):
        drafter_of(target, GOLDENS / "deepseek-v3")
