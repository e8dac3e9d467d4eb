"""EPLB against its published example, and what holds for any loads."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.expert_placement import (
    balancedness,
    device_loads,
    first_placement,
    keep_in_place,
    pack,
    places_of,
    rebalance,
    replicate,
)

LOADS = np.array([
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
])  # fmt: skip


def test_the_published_example():
    placement = rebalance(LOADS, num_places=16, num_groups=4, num_nodes=2, num_devices=8)
    assert placement.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]


def test_packing_and_replication_by_hand():
    assert pack(np.array([5.0, 4, 3, 3, 1, 0]), 2).tolist() == [[0, 3, 5], [1, 2, 4]]
    # 10 becomes 5 + 5, then 6 becomes 3 + 3, then one of the 5s is the most: 10 in three.
    assert replicate(np.array([6.0, 10, 2]), 6).tolist() == [0, 1, 2, 1, 0, 1]


def test_what_does_not_divide_is_refused():
    sizes = dict(num_places=16, num_groups=4, num_nodes=2, num_devices=8)
    with pytest.raises(ValueError, match="18 places cannot be divided into 8"):
        rebalance(LOADS, **{**sizes, "num_places": 18})
    with pytest.raises(ValueError, match="num_places=8 must be at least the 12 experts"):
        rebalance(LOADS, **{**sizes, "num_places": 8, "num_nodes": 1})


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, dict[str, int]]:
    nodes, per_node = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 4))
    groups = draw(st.sampled_from([1, 2, nodes, 2 * nodes]))
    experts = groups * draw(st.integers(1, 5))
    devices = nodes * per_node
    places = devices * (-(-experts // devices) + draw(st.integers(0, 2)))
    of_expert = st.lists(st.integers(0, 1000), min_size=experts, max_size=experts)
    load = draw(st.lists(of_expert, min_size=1, max_size=3))
    return np.array(load), dict(num_places=places, num_groups=groups, num_nodes=nodes, num_devices=devices)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_of_any_loads(problem: tuple[np.ndarray, dict[str, int]]):
    load, sizes = problem
    num_experts, devices, nodes, places = load.shape[1], sizes["num_devices"], sizes["num_nodes"], sizes["num_places"]
    if places // nodes < num_experts // nodes or (sizes["num_groups"] % nodes == 0 and num_experts % nodes):
        return
    placement = rebalance(load, **sizes)
    assert placement.shape == (len(load), places)
    for experts in placement:
        assert set(experts) == set(range(num_experts)), "every expert has a place"
        if sizes["num_groups"] % nodes == 0:  # a group is within one node
            group = experts // (num_experts // sizes["num_groups"])
            where = [set(np.flatnonzero(group == g) // (places // nodes)) for g in range(sizes["num_groups"])]
            assert all(len(of) == 1 for of in where)
    np.testing.assert_allclose(device_loads(load, placement, devices).sum(1), load.sum(1))
    even = balancedness(load, placement, devices)
    assert ((1 / devices - 1e-9 <= even) & (even <= 1 + 1e-9)).all()

    old = first_placement(1, num_experts, places)[0]
    for new, of_layer in zip(placement, load, strict=True):
        kept = keep_in_place(old, new, devices, nodes)
        assert sorted(kept) == sorted(new)
        same = [len(set(a) & set(b)) for a, b in zip(old.reshape(devices, -1), kept.reshape(devices, -1), strict=True)]
        assert (kept == old).sum() >= sum(same), "what stays on its device stays in its place"
        assert balancedness(of_layer[None], kept[None], devices) == pytest.approx(
            balancedness(of_layer[None], new[None], devices))
        np.testing.assert_array_equal(keep_in_place(kept, new, devices, nodes), kept)

    ids, counts = places_of(placement, num_experts, places)
    for of_layer, experts, count in zip(ids, placement, counts, strict=True):
        for expert in range(num_experts):
            assert of_layer[expert, : count[expert]].tolist() == np.flatnonzero(experts == expert).tolist()
            assert (of_layer[expert, count[expert] :] == of_layer[expert, 0]).all()


def test_replicas_even_out_what_one_expert_skews():
    load = np.array([[1000.0, 1, 1, 1, 1, 1, 1, 1]])
    before = balancedness(load, first_placement(1, 8, 8), 4)
    after = balancedness(load, rebalance(load, num_places=16, num_groups=1, num_nodes=1, num_devices=4), 4)
    assert before[0] < 0.26 and after[0] > 0.75
