"""Ring attention: layouts and their balance, both backends against the reference, on 2, 4 and 8 simulated devices."""

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels import interpret
from pallas_kernels.devices import DEVICES
from pallas_kernels.ring_attention import api, config, layout, mosaic_tpu, reference, xla
from tests.kernels.ring_cases import AXIS, LAYER, LAYERS, LAYOUTS, Case, Inputs, check, compiled, load, local_step, make
from tests.tolerances import ATTENTION

# Layouts


def test_layouts_by_hand():
    np.testing.assert_array_equal(layout.device_tokens("zigzag", 2, 8), [[0, 1, 6, 7], [2, 3, 4, 5]])
    np.testing.assert_array_equal(layout.device_tokens("striped", 2, 5), [[0, 2, 4], [1, 3, -1]])
    np.testing.assert_array_equal(layout.device_tokens("contiguous", 2, 5), [[0, 1, -1], [2, 3, 4]])
    np.testing.assert_array_equal(layout.owners("striped", 2, 3, first=5), [1, 0, 1])  # from the sequence's start


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 61, 128])
def test_inverse_restores_the_order(name, devices, length):
    tokens = layout.device_tokens(name, devices, length)
    held = np.where(tokens == layout.PADDING, -100, tokens * 3).reshape(-1)
    np.testing.assert_array_equal(held[layout.inverse(tokens)], np.arange(length) * 3)
    counts = (tokens != layout.PADDING).sum(1)
    assert counts.max() - counts.min() <= 2
    for row in tokens:
        assert (np.diff(row[row != layout.PADDING]) > 0).all()


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("held", [2, 4, 10])
def test_balance_of_the_causal_work(devices, held):
    """Pairs that each device needs in each step, against a mask of the whole sequence."""
    length = devices * held
    causal = np.tri(length, dtype=int)
    for name in LAYOUTS:
        tokens = layout.device_tokens(name, devices, length)
        pairs = layout.unmasked_pairs(name, devices, length)
        for device in range(devices):
            for step in range(devices):
                assert pairs[device, step] == causal[np.ix_(tokens[device], tokens[(device - step) % devices])].sum()
        assert pairs.sum() == length * (length + 1) // 2
        if name == "zigzag":
            assert (pairs == pairs[0]).all()
        if name == "striped":
            assert pairs.max() / pairs.min() <= (held + 1) / (held - 1)
        if name == "contiguous":  # why the other two exist
            assert (pairs[0, 1:] == 0).all() and (pairs[-1] > 0).all()


def test_lay_out_keeps_rows_apart():
    batch = layout.lay_out([(3, 5), (0, 1), (10, 4)], "striped", 2, num_tokens=8)
    np.testing.assert_array_equal(batch.cu_q_lens, [[0, 2, 3, 5], [0, 3, 3, 5]])
    np.testing.assert_array_equal(batch.positions[0], [4, 6, 0, 10, 12, -1, -1, -1])
    np.testing.assert_array_equal(batch.positions[1], [3, 5, 7, 11, 13, -1, -1, -1])
    flat = np.where(batch.source < 0, -100, batch.source * 2).reshape(-1)
    np.testing.assert_array_equal(flat[batch.restore], np.arange(10) * 2)
    with pytest.raises(ValueError, match="num_tokens=4 must be at least 5"):
        layout.lay_out([(3, 5), (0, 1), (10, 4)], "striped", 2, num_tokens=4)
    with pytest.raises(ValueError, match="none of zigzag"):
        layout.owners("snake", 2, 3)


# Reference


def test_reference_by_hand():
    """Three tokens on two devices, one head of size 2: a cached one on device 1, then one on each.

    The last token (on device 0, position 2) scores 0, ln 2, ln 5 against positions 0, 1, 2 and weighs 1/8, 2/8, 5/8.
    """
    q = np.array([[[[1.0, 0.0]]], [[[9.0, 9.0]]]], np.float32)
    k = np.array([[[[np.log(5.0), 7.0]]], [[[np.log(2.0), -3.0]]]], np.float32)
    v = np.array([[[[0.0, 8.0]]], [[[4.0, 0.0]]]], np.float32)
    cache = np.full((2, 1, 2, 4, 2, 1, 2), np.nan, np.float32)
    cache[1, 0, 1, 0, :, 0] = [[0.0, 0.0], [8.0, 16.0]]
    slots = np.full((2, 2, 4), 77)
    slots[1, 1, 0] = 0
    out, cache = reference.ring_attention(
        q, k, v, cache, 0, slots, np.array([[[1]], [[1]]]), np.array([[1], [2]]), np.array([[0, 1], [0, 1]]),
        np.array([[2], [1]]), scale=1.0)  # fmt: skip
    np.testing.assert_allclose(out[0, 0, 0], [1 + 1, 2 + 5], atol=1e-6)
    # Position 1 sees positions 0 and 1 only: scores 0 and 9 ln 2 - 27.
    weight = 1 / (1 + np.exp(9 * np.log(2) - 27))
    np.testing.assert_allclose(out[1, 0, 0], [8 * weight + 4 * (1 - weight), 16 * weight], atol=1e-5)
    np.testing.assert_array_equal(cache[0, 0, 1, 0, :, 0], [k[0, 0, 0], v[0, 0, 0]])
    np.testing.assert_array_equal(cache[1, 0, 1, 1, :, 0], [k[1, 0, 0], v[1, 0, 0]])


# Backends

FAST_XLA = {
    "one row": Case(rows=((0, 64),)),
    "uneven rows with cache": Case(rows=((37, 61), (0, 5), (100, 3), (0, 0))),
    "two devices": Case(rows=((9, 50), (0, 31)), devices=2, layout="striped"),
    "eight devices": Case(rows=((40, 75), (3, 2)), devices=8, layout="striped"),
    "contiguous": Case(rows=((20, 70),), devices=8, layout="contiguous"),
    "window": Case(rows=((90, 61), (0, 20)), window=13),
    "soft cap": Case(rows=((11, 40),), options={"soft_cap": 2.0}),
    "sinks": Case(rows=((11, 40),), options={"sinks": np.array([-1.0, 0.0, 1.0, 5.0], np.float32)}),
    "one kv head of 8": Case(rows=((11, 40),), heads=(8, 1)),
    "side by side": Case(rows=((11, 40), (0, 9)), side_by_side=True),
    "rows with zeros behind": Case(rows=((11, 40),), row_dim=24),
    "int8": Case(rows=((11, 40), (0, 9)), kv_dtype="int8", window=30),
    "fp8 side by side": Case(rows=((11, 40),), kv_dtype="float8_e4m3fn", side_by_side=True),
    "padding": Case(rows=((5, 30),), spare_tokens=20),
    "nothing": Case(rows=((0, 0), (0, 0)), spare_tokens=4),
}


@pytest.mark.parametrize("name", FAST_XLA)
def test_xla(name: str):
    check(FAST_XLA[name], "xla")


FAST_TPU = {
    "two devices": Case(rows=((9, 21), (0, 3)), devices=2),
    "four devices, striped, everything": Case(
        rows=((21, 26), (0, 3)), layout="striped", window=20,
        options={"soft_cap": 2.0, "sinks": np.array([-1.0, 0.0, 1.0, 5.0], np.float32)}),
    "side by side": Case(rows=((11, 20),), devices=2, side_by_side=True),
}  # fmt: skip


@pytest.mark.parametrize("name", FAST_TPU)
def test_mosaic_tpu(name: str):
    check(FAST_TPU[name], "mosaic_tpu", twice=name == "two devices")


def test_the_cache_is_not_copied():
    """A donated pool far larger than a step's tokens: temporaries do not grow with it."""
    case = Case(rows=((30, 60),))
    inputs, _ = make(case)
    pool = jax.ShapeDtypeStruct((4, LAYERS, 20000, 2, 2, 8, 16), jnp.float32)
    shapes = [jax.ShapeDtypeStruct(np.shape(a), a.dtype) for a in vars(inputs).values()]
    shapes[3] = pool
    shapes[4] = jax.ShapeDtypeStruct((4, 20000, 8), jnp.int32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), (AXIS,))
    step = partial(local_step, case=case, backend="xla", count_blocks=False)
    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec(AXIS), check_vma=False)
    memory = jax.jit(sharded, donate_argnums=3).lower(*shapes).compile().memory_analysis()
    of_a_device = pool.size * 4 // 4
    assert memory.alias_size_in_bytes >= of_a_device
    assert memory.temp_size_in_bytes < of_a_device // 20


def test_bfloat16():
    check(Case(rows=((21, 40), (0, 7))), "xla", "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_mosaic_tpu_on_eight_devices(name):
    check(Case(rows=((30, 43), (0, 5)), devices=8, layout=name, heads=(2, 1), head_dim=8), "mosaic_tpu", twice=False)


@pytest.mark.slow
def test_mosaic_tpu_bfloat16():
    check(Case(rows=((21, 20),), devices=2), "mosaic_tpu", "bfloat16")


def sweep(seeds) -> list[Case]:
    """Every layout x devices x heads x option, each with rows of its own: uneven, empty, chunks after chunks."""
    cases = []
    options = ({}, {"window": 9}, {"soft_cap": 2.0}, {"sinks": True}, {"window": 17, "soft_cap": 1.5, "sinks": True})
    for seed, (name, devices, heads, option) in itertools.product(
        seeds, itertools.product(LAYOUTS, (2, 4, 8), ((4, 4), (4, 2), (3, 1)), options)
    ):
        rng = np.random.default_rng([seed, len(cases)])
        rows = [(int(rng.integers(0, 60) * rng.integers(0, 2)), int(rng.integers(0, 50)))
                for _ in range(rng.integers(1, 4))]  # fmt: skip
        option = dict(option)
        if option.pop("sinks", False):
            option["sinks"] = rng.standard_normal(heads[0]).astype(np.float32)
        cases.append(Case(
            rows=tuple(rows), layout=name, devices=devices, heads=heads, head_dim=8, window=option.pop("window", None),
            options=option, seed=seed, spare_tokens=int(rng.integers(0, 4)), side_by_side=bool(rng.integers(0, 2)),
            blocks=((8, 16, 32), (4, 8, 8), (16, 32, 64))[rng.integers(0, 3)]))  # fmt: skip
    return cases


@pytest.mark.kernels
@pytest.mark.parametrize("case", sweep([0]), ids=lambda c: f"{c.layout}-{c.devices}-{c.heads}-{c.seed}")
def test_sweep(case: Case):
    check(case, "xla", twice=False)
    check(case, "mosaic_tpu", twice=False)


# What the TPU kernel computes and sends


def blocks_computed(name: api.Layout, devices: int = 4, tokens: int = 16, window: int | None = None):
    """[D, D] blocks computed by each device in each step, of a prompt of `tokens` a device, blocks of 8 x 8."""
    case = Case(rows=((0, tokens * devices),), layout=name, devices=devices, heads=(1, 1), head_dim=8, window=window,
                blocks=(8, 8, tokens))  # fmt: skip
    inputs, _ = make(case)
    visited, count, rounds = compiled(case, "mosaic_tpu", count_blocks=True)(inputs)[2:]
    assert (rounds == 1).all()
    assert ((count[:, 0] > 0) == (visited.reshape(devices, devices, 2).sum(2) > 0)).all()
    return visited.reshape(devices, devices, 2)  # of these without and with a mask


def test_masked_steps_are_skipped():
    contiguous = blocks_computed("contiguous")
    for device, step in itertools.product(range(4), range(4)):
        # Its own triangle of 2 x 2 blocks, everything from the left, nothing that came around from the right.
        want = [1, 2] if step == 0 else [4, 0] if step <= device else [0, 0]
        np.testing.assert_array_equal(contiguous[device, step], want)
    zigzag = blocks_computed("zigzag")
    # Two pieces of a block: both triangles and the square between them, then half of the 4, whatever the device.
    np.testing.assert_array_equal(zigzag, np.broadcast_to([[1, 2], [2, 0], [2, 0], [2, 0]], (4, 4, 2)))
    striped = blocks_computed("striped")
    np.testing.assert_array_equal(striped.sum(2), np.full((4, 4), 3))


@pytest.mark.slow
def test_a_window_makes_it_cheaper():
    windowed = blocks_computed("contiguous", window=8)
    # The triangle's diagonal and the one before it; from the left neighbour the last block; nothing from further away.
    np.testing.assert_array_equal(windowed.sum(2)[1:], [[3, 1, 0, 0]] * 3)


@pytest.mark.parametrize("name, window, want", [
    ("contiguous", None, [3, 2, 1, 0]), ("contiguous", 8, [1, 1, 1, 0]), ("zigzag", None, [3, 3, 3, 3])])  # fmt: skip
def test_blocks_go_no_further_than_needed(name, window, want):
    case = Case(rows=((0, 64),), layout=name, window=window, blocks=(8, 8, 16))
    inputs, _ = make(case)

    def hops(slots, *where):
        plan = api.ring_plan(api.StoredPositions(slots), *where, axis_name=AXIS, config=case.config, window=window)
        return plan.hops[None]

    def local(*arrays):
        slots, *where = (a[0] for a in arrays)
        return hops(api.write_positions(slots, *where), *where)

    arrays = (inputs.slot_positions, inputs.page_table, inputs.kv_lens, inputs.cu_q_lens, inputs.positions)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), (AXIS,))
    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec(AXIS),
                                check_vma=False))(*arrays)  # fmt: skip
    np.testing.assert_array_equal(got, np.broadcast_to(np.array(want)[:, None], got.shape))


def test_the_race_detector_sees_missing_flow_control(monkeypatch):
    """A device that sends without waiting for a credit writes into a buffer that its neighbour may still read."""
    real = mosaic_tpu.pl.semaphore_wait
    case = Case(rows=((0, 128),), devices=4, heads=(1, 1), head_dim=8, blocks=(8, 8, 8))
    inputs, _ = make(case)
    waits = []

    def without_credit(semaphore, value=1):
        # The kernel waits for its neighbours at the barrier (2), for a credit (1), at the end for both (2).
        waits.append(value)
        if isinstance(value, int) and value == 1:
            return
        if len(waits) == 1:
            real(semaphore, value)

    params = interpret.tpu_params()
    if hasattr(params, "on_race"):  # jax 0.10 never raises; an exception here would outlive the test
        params = replace(params, on_race="warn")
    monkeypatch.setattr(mosaic_tpu, "tpu_params", lambda: params)
    monkeypatch.setattr(mosaic_tpu.pl, "semaphore_wait", without_credit)
    compiled(case, "mosaic_tpu")(inputs)
    assert interpret.races_found()
    assert waits == [2, 1, 2]
    interpret.reset()


@pytest.mark.parametrize("backend", ["xla", "mosaic_tpu"])
def test_beside_a_tensor_axis(backend):
    """Two rings of two devices in one mesh, each with its own heads."""
    case = Case(rows=((5, 20),), devices=2, heads=(2, 1))
    halves = [make(Case(**{**vars(case), "seed": seed}))[0] for seed in (0, 0)]
    rng = np.random.default_rng(9)
    halves[1] = Inputs(**{**vars(halves[1]), "q": rng.standard_normal(halves[1].q.shape, np.float32)})
    both = Inputs(*(np.stack(pair) for pair in zip(*(vars(half).values() for half in halves), strict=True)))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("tensor", AXIS))
    spec = PartitionSpec("tensor", AXIS)

    def step(*arrays):
        out, _ = local_step(*(a[0] for a in arrays), case=case, backend=backend, count_blocks=False)
        return out[None]

    out = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(*vars(both).values())
    for half, got in zip(halves, out, strict=True):
        want = compiled(case, "xla")(half)[0]
        np.testing.assert_allclose(got, want, atol=1e-5)


# Decoding


@pytest.mark.parametrize("options", [{}, {"window": 11}, {"soft_cap": 2.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("devices", [4])
def test_decode_after_a_prefill(devices, options):
    """Three tokens a row, one at a time, against a prefill of all of them by the reference."""
    options = dict(options)
    window = options.pop("window", None)
    if options.pop("sinks", False):
        options["sinks"] = np.array([-1.0, 0.0, 1.0, 5.0], np.float32)
    steps, lengths = 3, (37, 1, 150)
    case = Case(rows=tuple((n, steps) for n in lengths), devices=devices, layout="striped", window=window)
    inputs, batch = make(case)
    where = (inputs.slot_positions, inputs.page_table, inputs.kv_lens, inputs.cu_q_lens, inputs.positions)
    want, want_cache = reference.ring_attention(
        inputs.q, inputs.k, inputs.v, load(inputs.kv_pages, case), LAYER, *where, scale=0.25, window=window, **options)
    flat = [a.reshape(-1, *a.shape[2:])[batch.restore].reshape(len(lengths), steps, *a.shape[2:])
            for a in (inputs.q, inputs.k, inputs.v, want)]  # fmt: skip
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    mine, all_same = PartitionSpec(AXIS), PartitionSpec()

    def step(q, k, v, positions, kv_pages, slots, table, lens, owned):
        kv_pages, slots, table, lens, owned = (a[0] for a in (kv_pages, slots, table, lens, owned))
        slots = api.write_decode_positions(slots, table, lens, positions, owned)
        out, kv_pages = api.context_decode_attention(
            q, k, v, kv_pages, jnp.int32(LAYER), api.StoredPositions(slots), table, lens, positions, owned,
            axis_name=AXIS, scale=0.25, window=window, **options)  # fmt: skip
        return out, kv_pages[None], slots[None]

    run = jax.jit(jax.shard_map(
        step, mesh=mesh, in_specs=(all_same,) * 4 + (mine,) * 5, out_specs=(all_same, mine, mine), check_vma=False))
    kv_pages, slots = inputs.kv_pages, inputs.slot_positions
    lens = inputs.kv_lens - np.diff(inputs.cu_q_lens)
    for number in range(steps):
        positions = np.array(lengths, np.int32) + number
        owned = positions % devices == np.arange(devices)[:, None]
        lens = (lens + owned).astype(np.int32)
        q, k, v, expected = (a[:, number] for a in flat)
        out, kv_pages, slots = run(q, k, v, positions, kv_pages, slots, inputs.page_table, lens, owned)
        np.testing.assert_allclose(out, expected, atol=ATTENTION["float32"])
    np.testing.assert_array_equal(load(kv_pages, case)[:, :, 1:], want_cache[:, :, 1:])  # page 0 is scratch


def test_merge_is_right_where_one_side_saw_nothing():
    part = xla.Partial(jnp.array([[1.0]]), jnp.array([[2.0]]), jnp.array([[[3.0, 4.0]]]))
    none = xla.nothing((1, 1), 2)
    for merged in (xla.merge(part, none), xla.merge(none, part)):
        jax.tree.map(np.testing.assert_array_equal, merged, part)
    assert np.isfinite(xla.merge(none, none).output).all()


# Sizes and refusals

LLAMA_8B = config.Problem(num_tokens=4096, num_rows=1, row_pages=32, num_heads=32, num_kv_heads=8, row_dim=128,
                          page_size=128, devices=8)  # fmt: skip


def test_configs_are_checked():
    with pytest.raises(ValueError, match="query_tokens=0 must be at least 1"):
        api.RingConfig(query_tokens=0, kv_tokens=8, round_tokens=8)
    with pytest.raises(ValueError, match="round_tokens=12 must be a multiple of kv_tokens=8"):
        api.RingConfig(query_tokens=8, kv_tokens=8, round_tokens=12)
    with pytest.raises(ValueError, match="kv_tokens=8 must be a multiple of page_size=16"):
        api.RingConfig(query_tokens=8, kv_tokens=8, round_tokens=8).check_page_size(16)


@pytest.mark.parametrize("name", ["v5e", "v6e", "v7x"])
def test_chosen_sizes_fit(name):
    chosen = config.choose_config(LLAMA_8B, DEVICES[name])
    config.check_fit(chosen, LLAMA_8B, DEVICES[name])
    assert chosen.query_tokens >= 128 and chosen.kv_tokens >= 256


def test_what_does_not_fit_is_refused_with_the_nearest_that_does():
    large = api.RingConfig(query_tokens=2048, kv_tokens=1024, round_tokens=4096)
    with pytest.raises(ValueError, match=r"query_tokens=2048.* needs [\d,]+ bytes.*nearest that fits is query_tokens"):
        config.check_fit(large, LLAMA_8B, DEVICES["v6e"])
    million = replace(LLAMA_8B, num_tokens=1 << 20, row_pages=1 << 13)
    small = api.RingConfig(query_tokens=32, kv_tokens=128, round_tokens=128)
    with pytest.raises(ValueError, match="bytes of SMEM for its plan and v6e has"):
        config.check_fit(small, million, DEVICES["v6e"])


def test_backends_are_chosen_or_refused():
    cpu = jax.devices()[0]
    spec = Case(rows=()).spec
    assert api.choose_backend("auto", spec, cpu).name == "xla"
    assert api.choose_backend("mosaic_tpu", spec, cpu).simulated
    with pytest.raises(ValueError, match="'triton' is not one of"):
        api.choose_backend("triton", spec, cpu)
    with pytest.raises(ValueError, match="kv_dtype int8 is not bfloat16 or float32"):
        api.choose_backend("mosaic_tpu", replace(spec, kv_dtype=jnp.dtype("int8")), cpu)
    with pytest.raises(ValueError, match="takes no local attention"):
        api.choose_backend("mosaic_tpu", spec, cpu, local=xla.attend_blocks)
    tpu = SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")
    chosen = api.choose_backend("auto", replace(spec, page_size=4), tpu)
    assert chosen.name == "xla" and "page_size=4 is not a multiple of 8" in str(chosen.fallback)
    assert api.choose_backend("auto", spec, tpu).name == "mosaic_tpu"
    unknown = api.choose_backend("auto", spec, SimpleNamespace(platform="tpu", device_kind="TPU v99"))
    assert unknown.name == "xla" and "no numbers for the device kind 'TPU v99'" in str(unknown.fallback)
    with pytest.raises(ValueError, match="ring attention backend 'xla': uint8 pages"):
        api.choose_backend("xla", replace(spec, kv_dtype=jnp.dtype("uint8")), cpu)
