"""Exchanges against what `ragged_all_to_all` promises, written out in numpy; and the slices that are asked of them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.exchange import Slices, dense_exchange, place_slices, row_slices
from sharding.mesh import make_mesh, parse_mesh

SPEC = jax.sharding.PartitionSpec
AXES = ("data", "tensor")


def oracle(operands: list[np.ndarray], outputs: list[np.ndarray], slices: list[Slices]) -> list[np.ndarray]:
    """Sends one slice after the other. What jax's documentation demands of sizes is asserted."""
    n = len(operands)
    results = [output.copy() for output in outputs]
    for sender, of in enumerate(slices):
        each = len(of.send_sizes) // n
        for i in range(n * each):
            receiver = i // each
            size, start, to = (int(a[i]) for a in (of.send_sizes, of.input_offsets, of.output_offsets))
            expected = int(slices[receiver].recv_sizes[sender * each + i % each])
            assert size == expected, f"{sender} sends {size} rows to {receiver}, which expects {expected}"
            assert 0 <= start and start + size <= len(operands[sender])
            assert 0 <= to and to + size <= len(results[receiver])
            results[receiver][to : to + size] = operands[sender][start : start + size]
    return results


def exchanged(mesh: str, operands: list[np.ndarray], outputs: list[np.ndarray], slices: list[Slices]) -> np.ndarray:
    """By the dense twin, on simulated devices."""

    def on_device(operand, output, *of):
        return dense_exchange(operand[0], output[0], Slices(*(a[0] for a in of)), AXES)[None]

    mapped = jax.jit(jax.shard_map(on_device, mesh=make_mesh(parse_mesh(mesh)), in_specs=SPEC(AXES),
                                   out_specs=SPEC(AXES), check_vma=False))
    return np.asarray(mapped(np.stack(operands), np.stack(outputs), *(np.stack(a) for a in zip(*slices, strict=True))))


def test_the_example_in_jax_s_documentation():
    operands = [np.array([1, 2, 2]), np.array([3, 4, 0])]
    outputs = [np.zeros(4, int)] * 2
    slices = [Slices(*map(np.array, of)) for of in (
        ([0, 1], [1, 2], [0, 0], [1, 1]),
        ([0, 1], [1, 1], [1, 2], [2, 1]),
    )]  # fmt: skip
    want = [[1, 3, 0, 0], [2, 2, 4, 0]]
    assert np.stack(oracle(operands, outputs, slices)).tolist() == want
    assert exchanged("2x1", operands, outputs, slices).tolist() == want


def of_devices(plan: Callable):
    """What every device of eight plans for itself."""
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(plan))(jnp.arange(8)))


def unstack(slices: Slices) -> list[Slices]:
    return [Slices(*of) for of in zip(*slices, strict=True)]


@pytest.mark.parametrize("held", [1, 3])
def test_rows_go_to_their_experts_sorted_and_come_back(held: int):
    """Random counts, none at all among them, through the oracle and the twin; rows say what they are."""
    n, rng = 8, np.random.default_rng(held)
    counts = rng.integers(0, 4, (n, n * held)) * rng.integers(0, 2, (n, n * held))
    counts[2] = 0
    counts[:, 1] = 0
    most, worst = int(counts.sum(1).max()), int(counts.sum())
    operands = []
    for sender in range(n):
        rows = [(sender, place, i) for place in range(n * held) for i in range(counts[sender, place])]
        operands.append(np.array(rows + [(-9, -9, -9)] * (most - len(rows))).reshape(most, 3))
    there, back, sizes = of_devices(lambda me: row_slices(jnp.asarray(counts, jnp.int32), me))
    there, back = unstack(there), unstack(back)
    empty = [np.full((worst, 3), -1)] * n
    arrived = oracle(operands, empty, there)
    for device, rows in enumerate(arrived):
        places = range(device * held, (device + 1) * held)
        want = [(sender, place, i) for place in places for sender in range(n) for i in range(counts[sender, place])]
        assert rows[: len(want)].tolist() == [list(row) for row in want]
        assert (rows[len(want) :] == -1).all()
        assert sizes[device].tolist() == counts[:, places].sum(0).tolist()
    np.testing.assert_array_equal(exchanged("4x2", operands, empty, there), np.stack(arrived))
    blank = [np.full((most, 3), -9)] * n
    returned = oracle(arrived, blank, back)
    np.testing.assert_array_equal(np.stack(returned), np.stack(operands))
    np.testing.assert_array_equal(exchanged("4x2", arrived, blank, back), np.stack(operands))


@pytest.mark.parametrize("held_before, held", [(2, 3), (3, 2)])
def test_experts_move_to_other_places(held_before: int, held: int):
    n, rng = 8, np.random.default_rng(0)
    sources = rng.integers(0, n * held_before, n * held)
    slices = unstack(of_devices(lambda me: place_slices(jnp.asarray(sources), me, n, held_before)))
    operands = list(np.arange(n * held_before).reshape(n, held_before))
    outputs = [np.full(held, -1)] * n
    assert np.concatenate(oracle(operands, outputs, slices)).tolist() == sources.tolist()
    assert exchanged("4x2", operands, outputs, slices).reshape(-1).tolist() == sources.tolist()
