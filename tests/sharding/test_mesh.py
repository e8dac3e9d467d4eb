"""Meshes as they are written, and what is said of those that cannot be."""

from types import SimpleNamespace

import pytest

from model.build import model_rules
from model.families.registry import read_config
from sharding.mesh import MeshError, MeshSpec, make_mesh, parse_mesh
from tests.model.harness import config_json


@pytest.mark.parametrize("text, spec", [
    ("8x1", MeshSpec(tensor=8)), ("2x4", MeshSpec(tensor=2, data=4)), ("tensor=4, data=2", MeshSpec(tensor=4, data=2)),
    ("pipeline=2,context=3", MeshSpec(pipeline=2, context=3)),
])  # fmt: skip
def test_spellings(text: str, spec: MeshSpec):
    assert parse_mesh(text) == spec == parse_mesh(str(spec))
    assert dict(make_mesh(spec).shape) == dict(data=spec.data, pipeline=spec.pipeline, context=spec.context,
                                               tensor=spec.tensor)  # fmt: skip


@pytest.mark.parametrize("text, message", [
    ("8", "is neither TENSORxDATA (8x1) nor axis=size pairs (tensor=4,data=2)"),
    ("2x2x2", "is neither TENSORxDATA"),
    ("tensor=two", "is neither TENSORxDATA"),
    ("0x2", "every axis must be at least 1"),
    ("tensor=-1", "every axis must be at least 1"),
    ("data=2,data=2", "axis 'data' is given twice"),
    ("tensr=2", "unknown axis 'tensr', known axes are data, pipeline, context, tensor; did you mean tensor?"),
    ("tp=2", "unknown axis 'tp', known axes are data, pipeline, context, tensor; did you mean tensor?"),
    ("expert=8", "did you mean --enable-expert-parallel, which divides experts over data and tensor?"),
    ("pancake=2", "unknown axis 'pancake', known axes are data, pipeline, context, tensor"),
])  # fmt: skip
def test_not_a_mesh(text: str, message: str):
    with pytest.raises(MeshError) as caught:
        parse_mesh(text)
    line = str(caught.value)
    assert line.startswith(f"--mesh {text!r}") and message in line and "\n" not in line


@pytest.mark.parametrize("spec, fits", [
    (MeshSpec(tensor=8, data=2), MeshSpec(tensor=8)),
    (MeshSpec(tensor=4, data=4), MeshSpec(tensor=4, data=2)),
    (MeshSpec(tensor=3, data=3), MeshSpec(tensor=3, data=2)),
    (MeshSpec(tensor=16), MeshSpec(tensor=8)),
    (MeshSpec(tensor=16, data=2), MeshSpec(tensor=8)),
    (MeshSpec(tensor=4, context=2, pipeline=2, data=3), MeshSpec(tensor=4, context=2)),
])  # fmt: skip
def test_more_devices_than_there_are(spec: MeshSpec, fits: MeshSpec):
    with pytest.raises(MeshError) as caught:
        make_mesh(spec)
    line = str(caught.value)
    assert line.startswith(f"--mesh {spec} needs {spec.num_devices} devices, this process has 8 (cpu); "
                           f"--mesh {fits} would fit; XLA_FLAGS=")  # fmt: skip
    make_mesh(fits)


def test_on_accelerators_nothing_is_simulated():
    with pytest.raises(MeshError, match=r"has 4 \(tpu\); --mesh tensor=4,data=1 would fit$"):
        make_mesh(MeshSpec(tensor=8), [SimpleNamespace(platform="tpu")] * 4)


def test_a_tensor_axis_that_divides_nothing():
    config = read_config(config_json("llama-gqa-tied"))  # 4 heads, 2 kv heads, 56, 128
    with pytest.raises(MeshError) as caught:
        model_rules(config, make_mesh(MeshSpec(tensor=3)))
    assert str(caught.value) == (
        "--mesh tensor=3 divides nothing of this model (4 heads with 2 kv heads, a vocabulary of 128, "
        "a feed-forward of 56); tensor=2 does"
    )
    with pytest.raises(MeshError, match=r"experts: 8\); tensor=2 or 4 does"):
        model_rules(read_config(config_json("qwen3-moe")), make_mesh(MeshSpec(tensor=7)))
    odd = config_json("llama-gqa-tied") | {"vocab_size": 131}  # no size divides everything
    with pytest.raises(MeshError, match=r"a vocabulary of 131, a feed-forward of 56\); tensor=2 does"):
        model_rules(read_config(odd), make_mesh(MeshSpec(tensor=3)))


def test_attention_that_does_not_divide_says_what_would():
    config = read_config(config_json("llama-gqa-tied"))
    assert model_rules(config, make_mesh(MeshSpec(tensor=8))).replicated["attention"].endswith(
        "on every device; tensor=2 or 4 would divide it")  # fmt: skip
    assert not model_rules(config, make_mesh(MeshSpec(tensor=2))).replicated
