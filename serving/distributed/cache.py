"""Followers keep what they compile, so that they too start in seconds the second time.

jax lets only process 0 write its cache, for the sake of file systems that all hosts share. Here each follower has a
folder of its own within the cache's, and no one else writes there. Private names of jax: this file only.
"""

import threading
from pathlib import Path
from typing import Any

import jax
from jax._src import compiler, distributed


def write_own_cache(rank: int) -> None:
    """After `jax.distributed.initialize`, before anything is compiled."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder:
        return
    own = Path(folder) / f"host-{rank}"
    own.mkdir(exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(own))
    write, lock = compiler._cache_write, threading.Lock()

    def write_as_process_0(*args: Any, **kwargs: Any) -> None:
        with lock:  # steps are compiled in several threads
            distributed.global_state.process_id = 0
            try:
                write(*args, **kwargs)
            finally:
                distributed.global_state.process_id = rank

    compiler._cache_write = write_as_process_0
