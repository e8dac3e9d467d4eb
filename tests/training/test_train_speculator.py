"""Drafting heads trained for a tiny target: they learn, go on after a kill, and draft in the engine as in training."""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.families.registry import read_config
from model.speculative.drafter import Settled
from scripts.draft_acceptance import main as acceptance_main
from scripts.speculator_training import features, objective, text, training
from scripts.speculator_training.batches import Batch, Corpus
from scripts.speculator_training.eagle3 import Eagle3
from scripts.speculator_training.export import stored_dtype
from scripts.speculator_training.method import Frozen, Method, Params, Target
from scripts.speculator_training.run import Refused, fit, make_method, most_frequent, writer
from scripts.train_speculator import main, parse
from serving.config import EngineConfig
from serving.decoding.speculation.config import SpeculativeConfig
from serving.drafters.loading import Surroundings
from serving.drafters.make import load_drafter
from serving.errors import InvalidRequest
from serving.loading import LoadedModel, load_model
from serving.request import SamplingParams
from tests.model import eagle_reference as reference
from tests.model import harness
from tests.tolerances import LOGITS_FLOAT32

GOLDEN = harness.GOLDENS / "llama-gqa-tied"
RECIPE = text.Recipe(model="tiny", prompts="some", max_tokens=20, seed=0)
FEW = ("--epochs", "3", "--draft-vocab-size", "60", "--intermediate-size", "24", "--num-speculative-tokens", "2",
       "--learning-rate", "0.01", "--float8")  # fmt: skip


def answers(prompts: Sequence[str], sampling: Sequence[SamplingParams]) -> list[tuple[list[int], list[int]]]:
    """20 tokens that climb, by a step and from a start of the prompt's own."""
    starts = [int(prompt) for prompt in prompts]
    return [([1, 100 + i % 20], [(7 * i + (1 + i % 3) * j) % 80 + 2 for j in range(20)]) for i in starts]


def write(file: Path, num_tokens: int, prompts: int = 60, recipe: text.Recipe = RECIPE) -> list[text.Sequence_]:
    return text.write_text(file, recipe, [str(i) for i in range(prompts)], num_tokens, lambda: nullcontext(answers))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(EngineConfig(model=str(GOLDEN), dtype="float32"))


@pytest.fixture(scope="module")
def corpus(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("text")
    sequences = write(folder / "text.jsonl", 1000)
    found = features.compute(folder, loaded, sequences, features.default_taps(loaded.model.config))
    return Corpus(sequences, found, with_taps=True)


@dataclass
class Case:
    options: Any
    method: Method
    target: Target
    corpus: Corpus
    frozen: Frozen  # what it trains with
    whole: Frozen  # what it drafts from


def case(kind: str, loaded: LoadedModel, corpus: Corpus, output: Path) -> Case:
    options = parse(["--method", kind, "--output", str(output), *FEW])
    target = Target.of(loaded)
    taps = features.default_taps(target.config)
    method = make_method(options, target, jnp.dtype("float32"), taps, corpus.features)
    drafted = most_frequent([corpus.sequences[i] for i in corpus.train()], 60, target.config.vocab_size)
    frozen = Frozen(target.embedding, target.output, jnp.asarray(drafted))
    whole = frozen if kind == "eagle3" else replace(frozen, drafted=jnp.arange(target.config.vocab_size))
    return Case(options, method, target, replace(corpus, with_taps=method.needs_taps), frozen, whole)


def run(of: Case, file: Path, **plan: Any) -> training.State:
    few = training.Plan(**{"epochs": 3, "batch_size": 4, "learning_rate": 1e-2, "seed": 0} | plan)
    return training.train(file, few, of.method, of.target, of.frozen, of.corpus, lambda epoch, params: None)


def test_text_goes_on_where_it_was_cut(tmp_path: Path):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    write(whole, 3000, prompts=200)
    write(cut, 300, prompts=200)
    with cut.open("a") as file:
        file.write('{"prompt": 96, "tempera')
    assert write(cut, 3000, prompts=200) == write(whole, 3000, prompts=200)
    assert cut.read_bytes() == whole.read_bytes()
    assert sum(sequence.num_written for sequence in write(cut, 100)) == 100
    with pytest.raises(text.TextError, match="50 prompts gave 1000 tokens, 3000 are wanted"):
        write(tmp_path / "few.jsonl", 3000, prompts=50)
    with pytest.raises(text.TextError, match="name another --work folder"):
        write(cut, 10, recipe=replace(RECIPE, max_tokens=21))


def test_features_are_the_models_and_computed_once(loaded: LoadedModel, corpus: Corpus, tmp_path: Path):
    model, found = harness.load(GOLDEN), corpus.features
    for q in (0, 37):
        tokens = corpus.sequences[q].tokens
        step = harness.batch([(tokens, 0)], num_tokens=32, num_rows=1)
        logits, _ = harness.all_logits(model, harness.kv_pages(model), step)
        at = slice(*found.starts[q : q + 2])
        assert found.best[at].tolist() == np.argmax(logits, axis=1)[: len(tokens)].tolist()
        again = model.project(model.output_matrix, jnp.asarray(found.hidden[at], jnp.float32))
        np.testing.assert_allclose(again, logits[: len(tokens)], atol=0.02 * float(jnp.std(logits)))
    assert features.compute(tmp_path, loaded, corpus.sequences, (0, 1, 1)).taps.shape == found.taps.shape
    progress = json.loads((tmp_path / "progress.json").read_text())
    (tmp_path / "progress.json").write_text(json.dumps(progress | {"starts": progress["starts"][:21]}))
    np.memmap(tmp_path / "best.bin", np.int32, "r+")[:] = -1
    assert (features.compute(tmp_path, loaded, corpus.sequences[:20], (0, 1, 1)).best == -1).all()
    again = features.compute(tmp_path, loaded, corpus.sequences, (0, 1, 1))
    assert (again.best[: found.starts[20]] == -1).all()
    assert (again.best[found.starts[20] :] == found.best[found.starts[20] :]).all()


def test_a_killed_run_ends_with_the_same_weights(loaded: LoadedModel, corpus: Corpus, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch):  # fmt: skip
    of = case("medusa", loaded, corpus, tmp_path)
    whole = run(of, tmp_path / "whole.npz")
    batch, before = Corpus.batch, iter(range(24))

    def dies(self: Corpus, *args: Any) -> Batch:
        if next(before, None) is None:
            raise KeyboardInterrupt
        return batch(self, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Corpus, "batch", dies)
        run(of, tmp_path / "cut.npz", save_seconds=0.0)
    resumed = run(of, tmp_path / "cut.npz")
    assert resumed.step == whole.step > 24
    assert all((resumed.params[name] == whole.params[name]).all() for name in whole.params)


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_it_learns_and_drafts_in_the_engine_as_in_training(kind: str, loaded: LoadedModel, corpus: Corpus,
                                                           tmp_path: Path):  # fmt: skip
    of = case(kind, loaded, corpus, tmp_path / "heads")
    report = fit(of.options, of.method, of.target, of.corpus, tmp_path)
    assert report["held_out"].keys() == {"0.0", "0.8"} and report["text_tokens"] >= 1000
    params = as_stored(of, tmp_path / f"{kind}.npz")
    loss = jax.jit(lambda params, batch: objective.loss(params, of.frozen, batch, of.method, of.target))
    means = [np.mean([loss(given, one) for one in of.corpus.batches(of.corpus.train(), 4)])
             for given in (of.method.init(jax.random.key(0), of.frozen), params)]  # fmt: skip
    assert means[1] < 0.9 * means[0]
    config = SpeculativeConfig.of({"method": kind, "model": str(tmp_path / "heads"), "num_speculative_tokens": 2})
    around = Surroundings(target=loaded.model, dtype=jnp.dtype("float32"), page_size=8, max_num_seqs=2,
                          max_model_len=None, attention_backend="xla", progress=False)  # fmt: skip
    drafter = load_drafter(config, around)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), drafter.state_shapes(32))
    matrices = loaded.model.embedding[...], loaded.model.output_matrix
    rows: Any = None  # of no use to drafters that choose
    propose = jax.jit(lambda now, step: drafter.propose(state, now, step, rows, 2, *matrices)[0].tokens[0])
    best = drafts_in_training(of, params)
    for q, at in ((0, 5), (1, 9), (38, 15)):
        one = of.corpus.batch(np.array([q]), 1)
        wide = (one.taps if drafter.taps else one.hidden).astype(np.float32)
        step = harness.batch([(one.tokens[0, : at + 1].tolist(), 0)], num_tokens=32, num_rows=2)
        now = Settled(features=jnp.asarray(wide[0]), next_tokens=jnp.asarray(np.roll(one.tokens[0], -1)),
                      last=jnp.asarray([at, 0]), lens=jnp.asarray([at + 1, 0]),
                      token=jnp.asarray([one.tokens[0, at + 1], 0]), samples=jnp.asarray([True, False]))  # fmt: skip
        for i, draft in enumerate(propose(now, step)):  # what is drafted is then taken for what the text has
            assert draft == of.whole.drafted[best(one)[i, at]]
            one = one._replace(tokens=jnp.asarray(one.tokens).at[0, at + 2 + i].set(draft))


def as_stored(of: Case, file: Path) -> Params:
    """The trained parameters, as their file rounds them."""
    state = run(of, file)
    tensors = of.method.tensors(state.params, np.asarray(of.frozen.drafted))
    dtypes = {name: stored_dtype(tensor, float8=True) for name, tensor in tensors.items()}
    assert {"bfloat16", "float8_e4m3fn"} <= {dtype.name for dtype in dtypes.values()}
    return {name: jnp.asarray(np.asarray(x).astype(dtypes[name]), jnp.float32) for name, x in state.params.items()}


def drafts_in_training(of: Case, params: Params) -> Callable[[Batch], jax.Array]:
    """Of a batch of one, the draft [k, L] that each head or step thinks best at each position."""
    rows = of.whole.output[of.whole.drafted]
    return jax.jit(lambda batch: jnp.stack([jnp.argmax(of.method.logits(params, rows, states[0]), axis=1)
                                            for states in of.method.states(params, of.whole, batch)]))  # fmt: skip


@dataclass(frozen=True, eq=False)
class Knows:
    """Drafts what the text has; a draft that starts at a position of `wrong` something else."""

    wrong: tuple[tuple[int, ...], ...]
    depth: int = 3

    def states(self, params: Params, frozen: Frozen, batch: Batch) -> list[jax.Array]:
        L = batch.tokens.shape[1]
        return [jax.nn.one_hot((jnp.roll(batch.tokens, -2 - i, axis=1) + jnp.isin(jnp.arange(L), jnp.asarray(wrong)))
                               % 128, 128) for i, wrong in enumerate(self.wrong)]  # fmt: skip

    def logits(self, params: Params, rows: jax.Array, states: jax.Array) -> jax.Array:
        return states


def test_acceptance_counts_leading_drafts(corpus: Corpus):
    """A text of 2 + 20 tokens: drafts start at positions 1 to 17, where it goes on for four more. Steps stand at 1, 5,
    7, 11 and 15."""
    frozen = Frozen(jnp.zeros((128, 1)), jnp.zeros((128, 1)), jnp.arange(128))
    method: Any = Knows(wrong=((3,), (3, 4, 5), (9,)))
    one = objective.acceptance({}, frozen, [corpus.batch(np.array([0]), 2)], method, num_ranks=2)
    assert one.positions == 17
    np.testing.assert_allclose(one.accepted, [16 / 17, 14 / 16, 13 / 14])
    np.testing.assert_allclose(one.length, (4 + 2 + 4 + 4 + 4) / 5)
    np.testing.assert_allclose([accuracy[0] for accuracy in one.accuracies], [16 / 17, 14 / 17, 16 / 17])


def test_what_is_held_out_is_not_trained_on(corpus: Corpus):
    held_out = {int(i) for temperature in text.TEMPERATURES for i in corpus.held_out(temperature)}
    assert held_out and not held_out & set(corpus.train().tolist())
    assert len(held_out) + len(corpus.train()) == len(corpus.sequences)
    batches = [set(chosen.tolist()) for chosen in corpus.epoch(0, 0, 4)]
    assert sum(map(len, batches)) == len(set.union(*batches)) and not held_out & set.union(*batches)


def test_an_interrupt_ends_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupted(options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("scripts.speculator_training.run.run", interrupted)
    assert main(["--method", "medusa", "--output", "never"]) == 130
    assert "the same command goes on where it was" in capsys.readouterr().err


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text("{}")
    begin = ["--method", "medusa", "--model", str(GOLDEN)]
    assert main([*begin, "--output", str(tmp_path)]) == 2
    assert "holds another model; name a new folder" in capsys.readouterr().err
    missing = ["--output", str(tmp_path / "new"), "--prompts", str(tmp_path / "none")]
    assert main([*begin, *missing]) == 2
    assert "--prompts" in capsys.readouterr().err
    assert acceptance_main([str(tmp_path / "text"), "--model", str(tmp_path / "none")]) == 2
    assert "none: no such file or folder" in capsys.readouterr().err
    for flag, value in (("--learning-rate", "0"), ("--epochs", "many"), ("--batch-size", "0")):
        with pytest.raises(SystemExit):
            main([*begin, "--output", str(tmp_path / "new"), flag, value])
        assert f"{flag}: '{value}' must be a" in capsys.readouterr().err


def test_text_that_fills_no_batch_is_refused(corpus: Corpus, loaded: LoadedModel, tmp_path: Path):
    """Heads that were not trained at all were written."""
    options = parse(["--method", "medusa", "--output", str(tmp_path), "--text-tokens", "1000", "--batch-size", "99"])
    target = Target.of(loaded)
    method = make_method(options, target, loaded.dtype, (), corpus.features)
    with pytest.raises(Refused, match="--text-tokens 1000: 46 answers to train on, .* fill no batch of 99"):
        fit(options, method, target, corpus, tmp_path)


def test_prompts_beyond_the_context_are_refused(monkeypatch: pytest.MonkeyPatch):
    def generate(*_: Any, **__: Any) -> None:
        raise InvalidRequest("the prompt has 99 tokens, the context 64", "prompt")

    llm = SimpleNamespace(service=SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None)), generate=generate)
    monkeypatch.setattr("scripts.speculator_training.run.LLM", lambda *_, **__: nullcontext(llm))
    with writer("", "auto") as write, pytest.raises(Refused, match="--prompts or --max-tokens: the prompt has 99"):
        write(["long"], [SamplingParams()])


def test_unrolled_states_are_those_of_drafting_anew():
    """Against a dense reference, with weights so large that attention and angles matter."""
    rng = np.random.default_rng(0)
    hf: dict[str, Any] = {**reference.HF, "num_hidden_layers": reference.TARGET_LAYERS}
    D, V, L = hf["hidden_size"], hf["vocab_size"], 12
    tensors = reference.eagle3_tensors(rng)
    embedding = rng.normal(size=(V, D)).astype(np.float32)
    plain = reference.eagle3(tensors, embedding)
    target = Target(read_config(hf), hf, np.ones(D), jnp.asarray(embedding), jnp.asarray(embedding),
                    lambda rows, hidden: hidden @ rows.T)  # fmt: skip
    scales = np.repeat(np.array([2, 0.5, 4], np.float32), D)
    method = Eagle3(target, 3, jnp.dtype("float32"), hf["intermediate_size"], reference.DRAFT_VOCAB, reference.TAPS,
                    scales)  # fmt: skip
    params = {name: jnp.asarray(x) for name, x in tensors.items() if name not in ("d2t", "t2d")}
    params["fc.weight"] = params["fc.weight"] * scales
    drafted = np.flatnonzero(tensors["t2d"])
    tokens, taps = rng.integers(0, V, (2, L)), rng.normal(size=(2, L, 3 * D)).astype(np.float32)
    everywhere: list[Any] = [tokens, np.array([L, L]), np.ones((2, L), bool), tokens, np.zeros((2, L, D)), taps]
    batch = Batch(*map(jnp.asarray, everywhere))
    states = method.states(params, Frozen(target.embedding, target.output, jnp.asarray(drafted)), batch)
    for at in (0, 6):
        for i, found in enumerate(states):
            wanted = plain.run(taps[1, : at + 1], tokens[1, 1 : at + 2], tokens[1, at + 2 : at + 2 + i].tolist())
            wanted = wanted / np.sqrt(np.mean(wanted**2) + hf["rms_norm_eps"]) * tensors["norm.weight"]
            np.testing.assert_allclose(found[1, at], wanted, atol=LOGITS_FLOAT32)
    written = method.tensors(params, drafted)
    np.testing.assert_array_equal(written["fc.weight"], tensors["fc.weight"])
    assert all((written[name] == tensors[name]).all() for name in ("d2t", "t2d"))
