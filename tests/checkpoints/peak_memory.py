"""Loads a model onto simulated devices and prints what it took: python -m tests.checkpoints.peak_memory MODEL MESH.

With COORDINATOR and RANK of 2 processes, each of which has half of the devices. One JSON line on standard output.
"""

import json
import sys
import threading
from pathlib import Path


def anonymous_bytes() -> int:
    """Of this process' memory, what is its own: not the pages of files that it has mapped."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


class Peak:
    """The most memory while it is entered."""

    def __enter__(self) -> "Peak":
        self.base = self.most = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.most = max(self.most, anonymous_bytes())

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self.held = anonymous_bytes()


def main(folder: str, mesh: str, coordinator: str = "", rank: str = "0") -> None:
    import jax

    if coordinator:
        jax.distributed.initialize(coordinator, num_processes=2, process_id=int(rank))

    from checkpoints.load import load_params
    from checkpoints.open import open_checkpoint
    from model.families.registry import param_sources, read_config
    from model.transformer import param_axes, param_dtypes
    from tests.model.harness import shapes_of

    checkpoint = open_checkpoint(folder)
    assert checkpoint.source is not None
    config = read_config(checkpoint.config)
    model = shapes_of(config, mesh)
    axes = param_axes(model)
    shapes = {path: shape for path, (shape, _) in axes.items()}
    shardings = {path: model.rules.sharding(names, shape) for path, (shape, names) in axes.items()}
    jax.block_until_ready([jax.device_put(0.0, device) for device in jax.local_devices()])
    with Peak() as peak:
        params = load_params(checkpoint.source, param_sources(config, shapes), shapes, shardings, param_dtypes(model))
        jax.block_until_ready(list(params.values()))
    mine = sum(shard.data.nbytes for value in params.values() for shard in value.addressable_shards)
    print(json.dumps({"peak": peak.most - peak.base, "held": peak.held - peak.base, "shards": mine,
                      "devices": len(jax.local_devices())}))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
