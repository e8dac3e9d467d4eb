"""Seconds of one pass of a kernel on a real device: many passes inside one call, so that dispatch does not count."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax

from scripts.aot.cases import LAYERS
from scripts.aot.program import Program


def seconds_of(make: Callable[[int], Callable[[], Any]], repeats: int) -> float:
    """make(n) is a call that does n passes on the device; what a call itself costs cancels out."""
    few, many = max(repeats // 8, 1), repeats
    best = {}
    for n in (few, many):
        run = make(n)
        jax.block_until_ready(run())
        times = []
        for _ in range(3):
            started = perf_counter()
            jax.block_until_ready(run())
            times.append(perf_counter() - started)
        best[n] = min(times)
    return (best[many] - best[few]) / (many - few)


def program_seconds(program: Program, repeats: int) -> float:
    """Passes that wait for each other. Those with a KV cache alternate between its layers, so that no cache of the chip
    serves them; the output is the next query."""
    state = list(jax.jit(program.inputs)())
    cache = program.donate[0] if program.donate else None

    def one(i: Any, arguments: list) -> list:
        if cache is None:  # the next pass waits for this one's result and is not changed by it
            out = program.fn(*arguments)
            return [arguments[0] + out.reshape(-1)[0] * 0, *arguments[1:]]
        arguments = list(arguments)
        if arguments[cache + 1].ndim == 0:
            arguments[cache + 1] = (i % LAYERS).astype(arguments[cache + 1].dtype)
        arguments[0], arguments[cache] = program.fn(*arguments)
        return arguments

    def make(n: int) -> Callable[[], Any]:
        def passes(arguments: list) -> list:
            return jax.lax.fori_loop(0, n, one, arguments)

        compiled = jax.jit(passes, donate_argnums=0).lower(state).compile()

        def run() -> Any:
            state[:] = compiled(state)
            return state[0]

        return run

    return seconds_of(make, repeats)
