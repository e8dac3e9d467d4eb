"""Two micro-batches of a layer of experts, as the TPU's compiler schedules them."""

import importlib.util

import pytest

from scripts.aot.experts import LAYERS, collectives, compile_layer
from scripts.aot.targets import TARGETS, prepare_environment, quiet_stderr


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_rows_of_one_half_travel_while_the_other_computes():
    """On v6e: half B is sent while A computes, and A comes back while B computes."""
    prepare_environment()
    with quiet_stderr():
        text = compile_layer(TARGETS["v6e"], LAYERS["qwen3-30b-a3b in halves"]).as_text()
    events = list(collectives(text))
    kernels = [index for index, (what, _) in enumerate(events) if what == "kernel"]
    travels = [(index, events.index(("done", name))) for index, (what, name) in enumerate(events) if what == "start"]
    assert len(kernels) == 6
    first, second = kernels[:3], kernels[3:]
    assert any(start < first[0] and done > first[-1] for start, done in travels), "B's dispatch around A's products"
    assert any(first[-1] < start < second[0] and done > second[-1] for start, done in travels), "A's return around B's"
