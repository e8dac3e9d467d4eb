"""Features: the residual stream as layers meet it, whatever stack and place of a pattern they have."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model.rope import rope_angles
from model.transformer import Transformer
from model.vocabulary import embed_tokens
from tests.model import harness
from tests.tolerances import LOGITS_FLOAT32

STEP = harness.batch([([5], 3), ([7, 11, 2, 9], 0)], num_tokens=8, num_rows=2)


def inputs_of_layers(model: Transformer) -> list[jax.Array]:
    """Layer after layer, without a scan; and the last one's output."""
    x = embed_tokens(model.rules, model.embedding[...], STEP.tokens) * model.config.embedding_scale
    pages = harness.kv_pages(model)
    angles = {layer.rope: rope_angles(layer.rope, STEP.positions) for layer in model.config.layers if layer.rope}
    found = []
    for stack in model.stacks:
        split = [nnx.split(layer) for layer in stack.layers]
        for period in range(stack.spec.periods):
            for place, (structure, params) in enumerate(split):
                layer = nnx.merge(structure, jax.tree.map(lambda a, period=period: a[period], params))
                number = stack.spec.first_layer + period * len(split) + place
                found.append(x)
                x, pages, _ = layer(x, angles, pages, jnp.asarray(number), jnp.asarray(0), STEP)
    return [*found, x]


def test_taps_are_the_inputs_of_their_layers() -> None:
    model = harness.load(harness.GOLDENS / "gemma3")
    assert len(model.stacks) == 2 and len(model.stacks[0].layers) > 1
    layers, used = model.config.num_layers, 5
    wanted = jax.jit(inputs_of_layers)(model)
    run = jax.jit(lambda model, pages, taps: model.with_features(pages, STEP, taps), static_argnums=2)
    plain, same, _, _ = run(model, harness.kv_pages(model), ())
    np.testing.assert_array_equal(same, plain)
    taps = (layers, 1, 1, 0, layers - 1)  # in any order, twice, and after the last layer
    hidden, features, _, _ = run(model, harness.kv_pages(model), taps)
    expected = np.concatenate([wanted[tap] for tap in taps], axis=1)
    np.testing.assert_allclose(features[:used], expected[:used], atol=LOGITS_FLOAT32, rtol=LOGITS_FLOAT32)
    np.testing.assert_array_equal(hidden[:used], plain[:used])
