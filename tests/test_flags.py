"""What flags mean once they are read."""

import re
from pathlib import Path

import pytest

from serving.flags import _parser, parse_flags
from sharding.mesh import MeshSpec, parse_mesh


@pytest.mark.parametrize("flags, spec", [
    ("--tensor-parallel-size 2", MeshSpec(tensor=2)),
    ("--data-parallel-size 2", MeshSpec(data=2)),
    ("--prefill-context-parallel-size 2", MeshSpec(context=2)),
    ("--pipeline-parallel-size 2", MeshSpec(pipeline=2)),
    ("-tp 2 -dp 3 -pcp 4 -pp 5", MeshSpec(tensor=2, data=3, context=4, pipeline=5)),
    ("--tensor_parallel_size=2", MeshSpec(tensor=2)),
    ("--pipeline-parallel-size 5 --tensor-parallel-size 2 --prefill-context-parallel-size 4 --data-parallel-size 3",
     MeshSpec(tensor=2, data=3, context=4, pipeline=5)),
])  # fmt: skip
def test_sizes_as_vllm_names_them_are_a_mesh(flags: str, spec: MeshSpec):
    assert parse_mesh(parse_flags(flags.split()).engine.mesh) == spec


def test_other_spellings_of_vllm():
    made = parse_flags(["-ep", "-sc", '{"method": "ngram", "num_speculative_tokens": 3}', "--max_num_seqs", "7",
                        "--served-model-name", "a_b", "c", "--api-key", "one", "two", "--api-key", "three"])
    assert made.engine.enable_expert_parallel and made.engine.max_num_seqs == 7
    assert made.engine.speculative_config is not None and made.engine.speculative_config.num_speculative_tokens == 3
    assert (made.served_model_name, made.served_model_aliases) == ("a_b", ("c",))
    assert made.api_keys == ("one", "two", "three")


def test_the_readme_lists_every_flag():
    section = (Path(__file__).parents[1] / "README.md").read_text().split("## Flags of `python -m serve`")[1]
    cells = re.findall(r"^\| (`--.*?) \|", section.split("\n## ")[0], re.MULTILINE)
    listed = [flag for cell in cells for flag in re.findall(r"--[a-z0-9-]+", cell.replace("[no-]", ""))]
    flags = {flag for action in _parser()._actions for flag in action.option_strings if flag.startswith("--")}
    assert sorted(listed) == sorted(flag for flag in flags if flag != "--help" and not flag.startswith("--no-"))
