"""Searches block sizes on the TPU or GPU of this machine and writes pallas_kernels/tuned/<device>.json.

    python -m scripts.tune                               # every kernel at every shape of scripts/aot/cases.py
    python -m scripts.tune --kernel grouped --shape mixtral

For each case it asks the kernel for its candidates (what it offers to `pallas_kernels.tuning.choose`), times every one
that fits, and stores the fastest. Commit the table. A kernel that chooses without `choose` has nothing to search; the
output names it.
"""

import argparse
import datetime
import sys
from typing import Any

import jax
from tqdm import tqdm

from pallas_kernels.devices import Device, device_of_kind
from pallas_kernels.tuning import Question, Search, describe, searching, shape_key, write_entry
from scripts.aot.cases import CASES
from scripts.aot.program import Case
from scripts.aot.timing import program_seconds


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.tune", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kernel", default="", metavar="TEXT", help="kernels whose name has TEXT in it")
    parser.add_argument("--shape", default="", metavar="TEXT", help="shapes whose name has TEXT in it")
    args = parser.parse_args(argv)
    devices = jax.devices()
    if devices[0].platform not in ("tpu", "gpu"):
        print(f"scripts.tune measures on a TPU or GPU; this process has {devices[0].platform} only", file=sys.stderr)
        return 2
    try:
        device = device_of_kind(devices[0].device_kind)
    except KeyError as error:
        print(error.args[0], file=sys.stderr)
        return 2
    cases = [case for case in CASES
             if case.platform == device.platform and args.kernel in case.kernel and args.shape in case.shape]
    if not cases:
        print(f"no case has {args.kernel!r} in its kernel and {args.shape!r} in its shape", file=sys.stderr)
        return 2
    done: set[tuple[str, str]] = set()
    for case in tqdm(cases, desc=f"Tuning on {device.name}", unit="case"):
        try:
            tune_case(case, devices, device, done)
        except Exception as error:  # one shape that a chip cannot hold must not end the search of the others
            tqdm.write(f"{case.name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return 0


def questions_of(case: Case, devices: list[Any]) -> list[Question]:
    """What block sizes the case's kernel asks `choose` for."""
    search = Search()
    with searching(search):
        jax.clear_caches()
        program = case.build(devices)
        jax.eval_shape(program.fn, *program.shapes)
    return list(search.questions.values())


def tune_case(case: Case, devices: list[Any], device: Device, done: set[tuple[str, str]]) -> None:
    questions = questions_of(case, devices)
    if not questions:
        tqdm.write(f"{case.name}: nothing to search: its kernel does not choose through pallas_kernels.tuning")
    for question in questions:
        if question.key in done:
            continue
        done.add(question.key)
        seconds = {}
        for candidate in tqdm(question.candidates, desc=case.name, unit="config", leave=False):
            try:
                seconds[candidate] = time_candidate(case, devices, question, candidate)
            except Exception as error:
                tqdm.write(f"{case.name}: {describe(candidate)}: {' '.join(str(error).split())[:200]}")
        if not seconds:
            continue
        best = min(seconds, key=seconds.__getitem__)
        path = write_entry(question.kernel, question.shape, device, best, microseconds=1e6 * seconds[best],
                           jax_version=jax.__version__, date=datetime.date.today().isoformat())  # fmt: skip
        tqdm.write(f"{question.kernel} {shape_key(question.shape)}: {describe(best)}, {1e6 * seconds[best]:.1f} us "
                   f"(of {len(seconds)}; slowest {1e6 * max(seconds.values()):.1f} us) -> {path}")


def time_candidate(case: Case, devices: list[Any], question: Question, candidate: Any) -> float:
    with searching(Search(answers={question.key: candidate})):
        jax.clear_caches()  # a kernel traced before would keep its block sizes
        return program_seconds(case.build(devices), 32)


if __name__ == "__main__":
    sys.exit(main())
