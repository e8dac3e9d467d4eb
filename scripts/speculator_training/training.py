"""The loop: AdamW, with a checkpoint every so often that a later run goes on from."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from scripts.speculator_training import objective
from scripts.speculator_training.batches import Corpus
from scripts.speculator_training.method import Frozen, Method, Params, Target

WARM_UP, DECAY = 20, 0.4  # steps; the share of all steps in which the rate falls


@dataclass(frozen=True, kw_only=True)
class Plan:
    epochs: int
    batch_size: int  # sequences
    learning_rate: float  # the highest
    seed: int
    save_seconds: float = 60.0


@dataclass(frozen=True)
class State:
    step: int
    seconds: float  # spent on steps, over all runs
    params: Params
    optimizer: Any


def train(file: Path, plan: Plan, method: Method, target: Target, frozen: Frozen, corpus: Corpus,
          after_epoch: Callable[[int, Params], None]) -> State:  # fmt: skip
    """From the file's state to the end of the last epoch. The order of sequences follows from the seed alone, so a run
    that was killed and went on ends with the same weights. The number of epochs may differ from the file's: only what
    is left of the schedule changes. after_epoch: is told how many are done."""
    per_epoch = len(corpus.epoch(plan.seed, 0, plan.batch_size))
    total = plan.epochs * per_epoch
    rate = _schedule(plan.learning_rate, total)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.01))
    params = method.init(jax.random.key(plan.seed), frozen)
    state = State(0, 0.0, params, optimizer.init(params))
    same = {name: value for name, value in asdict(plan).items() if name not in ("epochs", "save_seconds")}
    identity = {**same, "config": method.config(), "num_sequences": len(corpus.sequences),
                "dtype": str(target.embedding.dtype)}  # fmt: skip
    state = _load(file, identity, state)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Params, moments: Any, frozen: Frozen, batch: Any) -> tuple[Params, Any, jax.Array]:
        value, gradients = jax.value_and_grad(objective.loss)(params, frozen, batch, method, target)
        updates, moments = optimizer.update(gradients, moments, params)
        params = cast(Params, optax.apply_updates(params, updates))
        return params, moments, value

    step, params, moments, losses = state.step, state.params, state.optimizer, []
    began = saved = time.monotonic()
    with tqdm(total=total, initial=step, unit="step", desc="Training") as bar:
        while step < total:
            epoch, place = divmod(step, per_epoch)
            batches = corpus.epoch(plan.seed, epoch, plan.batch_size)
            for chosen in batches[place:]:
                params, moments, value = update(params, moments, frozen, corpus.batch(chosen, plan.batch_size))
                losses = [*losses[-49:], float(value)]
                step += 1
                bar.update()
                bar.set_postfix(loss=f"{np.mean(losses):.3f}")
                if time.monotonic() - saved > plan.save_seconds:
                    saved = time.monotonic()
                    _save(file, identity, State(step, state.seconds + saved - began, params, moments))
            done = State(step, state.seconds + time.monotonic() - began, params, moments)
            _save(file, identity, done)
            after_epoch(epoch + 1, params)
    return State(step, state.seconds + time.monotonic() - began, params, moments)


def _schedule(highest: float, total: int) -> optax.Schedule:
    """Up, level, and down to nothing: until it falls, it does not depend on the number of steps."""
    falls = max(int((1 - DECAY) * total), WARM_UP)
    up, down = optax.linear_schedule(0.0, highest, WARM_UP), optax.linear_schedule(highest, 0.0, max(total - falls, 1))
    return optax.join_schedules([up, optax.constant_schedule(highest), down], [WARM_UP, falls])


def _save(file: Path, identity: dict[str, Any], state: State) -> None:
    """Whole or not at all."""
    leaves = jax.tree.leaves((state.params, state.optimizer))
    part = file.with_suffix(".part.npz")
    np.savez(part, *map(np.asarray, leaves), about=json.dumps([identity, state.step, state.seconds]))
    part.replace(file)


def _load(file: Path, identity: dict[str, Any], fresh: State) -> State:
    """The file's state where it is one of this training, otherwise the fresh one."""
    if not file.exists():
        return fresh
    with np.load(file) as saved:
        found, step, seconds = json.loads(str(saved["about"]))
        if found != json.loads(json.dumps(identity)):
            return fresh
        leaves, structure = jax.tree.flatten((fresh.params, fresh.optimizer))
        stored = [jnp.asarray(saved[f"arr_{i}"]) for i in range(len(leaves))]
    params, moments = jax.tree.unflatten(structure, stored)
    return State(step, seconds, params, moments)
