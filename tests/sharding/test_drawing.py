"""A mesh drawn as text."""

from sharding.drawing import draw_mesh
from sharding.mesh import MeshSpec, make_mesh


def test_the_innermost_axis_runs_to_the_right():
    assert draw_mesh(make_mesh(MeshSpec(tensor=4, data=2))) == [
        "data  tensor  0      1      2      3",
        "0             cpu:0  cpu:1  cpu:2  cpu:3",
        "1             cpu:4  cpu:5  cpu:6  cpu:7",
    ]


def test_axes_of_one_device_are_left_out():
    assert draw_mesh(make_mesh(MeshSpec(data=2))) == ["data  0      1", "      cpu:0  cpu:1"]
    assert draw_mesh(make_mesh(MeshSpec())) == ["tensor  0", "        cpu:0"]


def test_three_axes():
    lines = draw_mesh(make_mesh(MeshSpec(data=2, context=2, tensor=2)))
    assert lines[0].split() == ["data", "context", "tensor", "0", "1"]
    assert [line.split() for line in lines[1:]] == [
        ["0", "0", "cpu:0", "cpu:1"], ["0", "1", "cpu:2", "cpu:3"], ["1", "0", "cpu:4", "cpu:5"],
        ["1", "1", "cpu:6", "cpu:7"],
    ]  # fmt: skip
