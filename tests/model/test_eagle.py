"""EAGLE's drafters on pages, step after step, against a dense reference that begins anew every time."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from model.batch import StepBatch
from model.families.registry import read_config
from model.speculative.drafter import Settled
from model.speculative.eagle_checkpoint import draft_tokens
from model.speculative.eagle_drafter import EagleDrafter
from serving.decoding.speculation.config import SpeculativeConfig
from serving.drafters.eagle import load_eagle
from serving.drafters.loading import Surroundings
from serving.errors import ConfigError
from tests.model import eagle_reference as reference
from tests.model import harness

V, D = reference.HF["vocab_size"], reference.HF["hidden_size"]
EMBEDDING, OUTPUT = (np.random.default_rng(i).normal(size=(V, D)).astype(np.float32) * 0.4 for i in (1, 2))
PAGE, ROW_PAGES, PAGES, NUM_TOKENS = 8, 6, 32, 16


def write(folder: Path, tensors: Mapping[str, np.ndarray], **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**reference.HF, **more}))
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, folder / "model.safetensors")
    return folder


def load(folder: Path, method: str, num: int | None = None, mesh: str = "1x1", **more: Any) -> EagleDrafter:
    target = harness.shapes_of(read_config({**reference.HF, "num_hidden_layers": reference.TARGET_LAYERS}), mesh)
    around = Surroundings(target=target, dtype=jnp.dtype(jnp.float32), page_size=PAGE, max_num_seqs=2,
                          max_model_len=None, attention_backend="xla", progress=False)  # fmt: skip
    config = SpeculativeConfig.of({"method": method, "model": str(folder), "num_speculative_tokens": num, **more})
    return load_eagle(config, around)


def kind(method: str, folder: Path, **more: Any) -> tuple[Path, reference.Reference, int]:
    """(folder, its reference, numbers of a feature)"""
    rng = np.random.default_rng(3)
    if method == "eagle":
        tensors = reference.eagle1_tensors(rng)
        tensors |= {f"layers.0.self_attn.{p}_proj.bias": rng.normal(size=size).astype(np.float32)
                    for p, size in (("q", 32), ("k", 16), ("v", 16))}  # fmt: skip
        write(folder, tensors | {"lm_head.weight": OUTPUT})
        hf = {"model_type": "eagle", "model": {**reference.HF, "bias": False, "eagle_fc_bias": True, "qkv_bias": True}}
        (folder / "config.json").write_text(json.dumps(hf))  # as for vLLM
        return folder, reference.eagle1(tensors, EMBEDDING, OUTPUT), D
    tensors = reference.eagle3_tensors(rng)
    return write(folder, tensors, draft_vocab_size=reference.DRAFT_VOCAB), reference.eagle3(tensors, EMBEDDING), 3 * D


class Sequences:
    """Two rows that a target has read so far: what it computed and said, made up."""

    def __init__(self, num_features: int):
        rng = np.random.default_rng(4)
        self.features = rng.normal(size=(2, 64, num_features)).astype(np.float32)
        self.tokens = rng.integers(0, V, (2, 65))
        self.rng = rng

    def step(self, rows: Sequence[tuple[int, int, int]]) -> tuple[StepBatch, Settled]:
        """rows: (tokens before the step, settled ones in it, rejected ones after them)."""
        new = [(self.rng.integers(0, V, settled + rejected).tolist(), start) for start, settled, rejected in rows]
        size = NUM_TOKENS
        batch = harness.batch(new, num_tokens=size, num_rows=2, row_pages=ROW_PAGES, page_size=PAGE)
        table = np.zeros((2, ROW_PAGES), np.int32)  # pages that the rows have, and no others
        for row, length in enumerate(np.asarray(batch.kv_lens)):
            table[row, : -(-length // PAGE)] = 1 + row * ROW_PAGES + np.arange(-(-length // PAGE))
        features = self.rng.normal(size=(size, self.features.shape[2])).astype(np.float32)
        following = self.rng.integers(0, V, size)
        at = np.asarray(batch.cu_q_lens)
        for row, (start, settled, _) in enumerate(rows):
            features[at[row] : at[row] + settled] = self.features[row, start : start + settled]
            following[at[row] : at[row] + settled] = self.tokens[row, start + 1 : start + settled + 1]
        lens = np.array([start + settled for start, settled, _ in rows])
        return batch._replace(page_table=jnp.asarray(table)), Settled(
            jnp.asarray(features), jnp.asarray(following), jnp.asarray([at[i] + r[1] - 1 for i, r in enumerate(rows)]),
            jnp.asarray(lens), jnp.asarray([self.tokens[i, n] for i, n in enumerate(lens)]), jnp.ones(2, bool),
        )  # fmt: skip

    def of(self, row: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        return self.features[row, :length], self.tokens[row, 1 : length + 1]


# Chunks of a prompt, then drafts of which some are accepted, over page boundaries and with lengths that differ.
STEPS = (((0, 5, 0), (0, 9, 0)), ((5, 1, 0), (9, 4, 0)), ((6, 2, 2), (13, 1, 4)), ((8, 1, 3), (14, 4, 0)))


def propose(drafter: EagleDrafter, sequences: Sequences, num: int):
    rows: Any = None  # of no use to drafters that choose
    shapes = drafter.state_shapes(PAGES)
    state = jnp.full(shapes.shape, 1e4, shapes.dtype)  # whoever reads what was not written will show it
    run = jax.jit(lambda state, settled, batch: drafter.propose(
        state, settled, batch, rows, num, jnp.asarray(EMBEDDING), jnp.asarray(OUTPUT)))
    for step in STEPS:
        batch, settled = sequences.step(step)
        drafts, state = run(state, settled, batch)
        yield [start + count for start, count, _ in step], drafts


@pytest.mark.parametrize("method", [pytest.param("eagle", marks=pytest.mark.slow), "eagle3"])
def test_chain(method: str, tmp_path: Path) -> None:
    folder, plain, size = kind(method, tmp_path)
    drafter, sequences = load(folder, method, 4), Sequences(size)
    for lens, drafts in propose(drafter, sequences, 4):
        for row, length in enumerate(lens):
            assert drafts.tokens[row].tolist() == plain.chain(*sequences.of(row, length), 4)
        assert drafts.parents is None


EAGLE1_OF_SPECULATORS = {
    "architectures": ["EagleSpeculator", "LlamaDecoderLayer"], "speculators_model_type": "eagle",
    "speculators_version": "0.1.0", "speculators_config": {"algorithm": "eagle"}, "fusion_bias": True,
    "layernorms": False, "transformer_layer_architecture": "LlamaDecoderLayer", "torch_dtype": "float32",
    "transformer_layer_config": dict(reference.HF),
}  # fmt: skip


def test_eagle1_of_speculators_with_more_norms_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"fusion_fc.weight": np.zeros((D, 2 * D), np.float32)})
    (tmp_path / "config.json").write_text(json.dumps(EAGLE1_OF_SPECULATORS | {"layernorms": True}))
    with pytest.raises(ConfigError, match="layernorms=true of an EAGLE head is not supported, only false"):
        load(tmp_path, "eagle", 3)


def tree_of_reference(plain: reference.Reference, features, tokens, *, top_k: int, depth: int, num: int):
    values: dict[tuple[int, ...], float] = {(): 0.0}
    alive: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        children = []
        for path in alive:
            given = plain.log_probs(plain.run(features, tokens, list(path)))
            for token in np.argsort(-given)[:top_k].tolist():
                children.append((*path, token))
                values[children[-1]] = values[path] + float(given[token])
        alive = sorted(children, key=lambda path: -values[path])[:top_k]
    return set(sorted(values, key=lambda path: -values[path])[1 : num + 1])


def paths_of(tokens: np.ndarray, parents: np.ndarray) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), int(token)))
    return found


def test_dynamic_tree(tmp_path: Path) -> None:
    folder, plain, size = kind("eagle3", tmp_path)
    drafter, sequences = load(folder, "eagle3", 8, eagle_topk=3, eagle_num_steps=3), Sequences(size)
    for lens, drafts in propose(drafter, sequences, 8):
        for row, length in enumerate(lens):
            paths = paths_of(np.asarray(drafts.tokens)[row], np.asarray(drafts.parents)[row])
            wanted = tree_of_reference(plain, *sequences.of(row, length), top_k=3, depth=3, num=8)
            assert set(paths) == wanted and len(paths) == 8


@pytest.mark.slow
def test_static_tree(tmp_path: Path) -> None:
    """Of a head that `speculators` has written."""
    tensors = reference.eagle1_tensors(np.random.default_rng(3))
    plain, size = reference.eagle1(tensors, EMBEDDING, OUTPUT), D
    renamed = {name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): x for name, x in tensors.items()}
    folder = write(tmp_path, renamed)
    (tmp_path / "config.json").write_text(json.dumps(EAGLE1_OF_SPECULATORS))
    choices = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 0, 1)]
    drafter, sequences = load(folder, "eagle", speculative_token_tree=choices), Sequences(size)
    for lens, drafts in propose(drafter, sequences, len(choices)):
        for row, length in enumerate(lens):
            features, tokens = sequences.of(row, length)
            wanted: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
            for ranks in choices:
                before = wanted[ranks[:-1]]
                given = plain.log_probs(plain.run(features, tokens, list(before)))
                wanted[ranks] = (*before, int(np.argsort(-given)[ranks[-1]]))
            paths = paths_of(np.asarray(drafts.tokens)[row], np.asarray(drafts.parents)[row])
            assert set(paths) == set(wanted.values()) - {()}


@pytest.mark.parametrize("each", [False, True])
def test_a_head_from_speculators(each: bool, tmp_path: Path) -> None:
    """Other names, embeddings of its own, features of two layers, and norms: of these as one or of each, of what
    attention is added to, and of what is fed again. One of them has a window."""
    tensors = reference.eagle3_tensors(np.random.default_rng(5), "layers.0", taps=2)
    tensors["norm.weight"] *= 3  # so that it matters whether the norm of a token is once or twice
    scales = np.random.default_rng(7).normal(size=2 * D).astype(np.float32)
    tensors |= {f"fc_norm.{i}.weight": scales[D * i :][:D] for i in range(2)} if each else {"input_norm.weight": scales}
    hf = {**reference.HF, "layer_types": ["sliding_attention" if each else "full_attention"], "sliding_window": 5}
    own = np.random.default_rng(6).normal(size=(V, D)).astype(np.float32)
    write(tmp_path, tensors | {"embed_tokens.weight": own})
    (tmp_path / "config.json").write_text(json.dumps({  # there is no model_type
        "speculators_model_type": "eagle3", "speculators_version": "0.8",
        "speculators_config": {"algorithm": "eagle3"}, "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": reference.DRAFT_VOCAB, "fc_norm": each, "norm_before_fc": not each,
        "norm_before_residual": True, "norm_output": True, "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, 3], "transformer_layer_config": hf,
    }))  # fmt: skip
    drafter = load(tmp_path, "eagle3", 3)
    assert drafter.taps == (1, 3)
    plain, sequences = reference.eagle3(tensors, own, normed=["residual", "output"], hf=hf), Sequences(2 * D)
    for lens, drafts in propose(drafter, sequences, 3):
        for row, length in enumerate(lens):
            assert drafts.tokens[row].tolist() == plain.chain(*sequences.of(row, length), 3)
    if each:
        with pytest.raises(ConfigError, match="the head's attention has a window, .* a chain does"):
            load(tmp_path, "eagle3", 6, eagle_topk=2)


def test_draft_ids_become_the_target_s(tmp_path: Path) -> None:
    tensors = reference.eagle3_tensors(np.random.default_rng(7))
    known = draft_tokens(tensors["d2t"])
    assert (np.flatnonzero(tensors["t2d"]) == known).all()
    network = load(write(tmp_path, tensors, draft_vocab_size=reference.DRAFT_VOCAB), "eagle3", 3).network
    _, tokens = network.best(jnp.zeros((1, D)), jnp.asarray(OUTPUT), reference.DRAFT_VOCAB)
    assert tokens[0].tolist() == known.tolist()  # all are equal: in the order of draft ids


REFUSED = {
    "another target": (dict(vocab_size=50), {}, "the EAGLE head has vocab_size=50, the target has 48"),
    "more layers": (dict(num_hidden_layers=2), {}, "num_hidden_layers=2 of an EAGLE head"),
    "unknown key": (dict(surprise=1), {}, "surprise"),
    "left over": ({}, {"extra.weight": np.zeros(3, np.float32)}, "left-over tensors: extra.weight"),
    "norms twice": (dict(fc_norm=True, norm_before_fc=True), {}, "norm_before_fc and fc_norm of an EAGLE-3 head"),
    "a norm that is not there": (dict(norm_before_fc=True), {}, "missing tensors: input_norm.weight"),
    "norms that are not there": (dict(fc_norm=True), {}, "missing tensors: fc_norm.0.weight, fc_norm.1.weight"),
    "another kind": (dict(eagle_config={"use_mtp_layernorm": True}), {}, "eagle_config.use_mtp_layernorm=true"),
    "layers with a window, or not": (dict(use_sliding_window=True, sliding_window=64), {}, "sliding_window"),
    "layers beyond": (dict(eagle_aux_hidden_state_layer_ids=[1, 2, 9]), {}, r"\[1, 2, 9\] are not all in 0 to 4"),
    "map twice": ({}, {"d2t": np.zeros(20, np.int64) - np.arange(20)}, "or one twice"),
    "maps differ": ({}, {"t2d": np.ones(48, bool)}, "d2t and t2d name different tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    config, tensors, message = REFUSED[case]
    given = reference.eagle3_tensors(np.random.default_rng(8)) | tensors
    folder = write(tmp_path, given, **{"draft_vocab_size": reference.DRAFT_VOCAB, **config})
    with pytest.raises(ConfigError, match=message):
        load(folder, "eagle3", 3)


def test_layers_of_the_config(tmp_path: Path) -> None:
    tensors = reference.eagle3_tensors(np.random.default_rng(9))
    given = {"draft_vocab_size": reference.DRAFT_VOCAB}
    assert load(write(tmp_path / "a", tensors, **given), "eagle3", 3).taps == (2, 2, 1)
    nested = given | {"eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True, "use_last_layernorm": True,
        "use_input_layernorm_in_first_layer": True, "use_mtp_layernorm": False, "parallel_draft_step": None,
    }, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}  # fmt: skip
    assert load(write(tmp_path / "b", tensors, **nested), "eagle3", 3).taps == (1, 2, 3)


def test_a_tree_that_is_a_chain_is_drafted_as_one(tmp_path: Path) -> None:
    folder, _, _ = kind("eagle3", tmp_path)
    drafter = load(folder, "eagle3", speculative_token_tree="[(0,), (0, 0), (0, 0, 0)]")
    assert drafter.tree is None and drafter.max_drafts == 3


def test_a_tree_wider_than_the_head_is_refused(tmp_path: Path) -> None:
    folder, _, _ = kind("eagle3", tmp_path)
    with pytest.raises(ConfigError, match="21 children of a token is wider than the head's vocabulary of 20"):
        load(folder, "eagle3", 30, eagle_topk=21)
    with pytest.raises(ConfigError, match="2 children a token on 2 levels has 6 tokens to choose from"):
        load(folder, "eagle3", 8, eagle_topk=2, eagle_num_steps=2)
