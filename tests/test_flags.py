"""What flags mean once they are read."""

import pytest

from serving.flags import parse_flags
from sharding.mesh import MeshSpec, parse_mesh


@pytest.mark.parametrize("flags, spec", [
    ("--tensor-parallel-size 2", MeshSpec(tensor=2)),
    ("--data-parallel-size 2", MeshSpec(data=2)),
    ("--prefill-context-parallel-size 2", MeshSpec(context=2)),
    ("--pipeline-parallel-size 2", MeshSpec(pipeline=2)),
    ("--pipeline-parallel-size 5 --tensor-parallel-size 2 --prefill-context-parallel-size 4 --data-parallel-size 3",
     MeshSpec(tensor=2, data=3, context=4, pipeline=5)),
])  # fmt: skip
def test_sizes_as_vllm_names_them_are_a_mesh(flags: str, spec: MeshSpec):
    assert parse_mesh(parse_flags(flags.split()).engine.mesh) == spec
