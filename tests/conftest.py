"""Before anything imports jax: CPU only, 8 simulated devices, one compilation cache for all test processes, and quick
compilation: tiny models take seconds to compile and milliseconds to run. Modules marked `optimized` compile as a server
does, and so do the servers of tests/e2e."""

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

CACHE = Path.home() / ".cache" / "pageloom" / "xla"
MAPPINGS = Path("/proc/self/maps")

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]).strip()
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# Servers of the tests are on this machine, whatever proxy the way out of it has. Nobody looks at what is printed.
for name in ("NO_PROXY", "no_proxy"):
    os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1,localhost"]))
for name in ("COLUMNS", "FORCE_COLOR"):
    os.environ.pop(name, None)
settings.load_profile("ci")  # hypothesis' own: the same examples everywhere, however long they take


class FilesAndServers(LoadScopeScheduling):
    """A worker runs a whole file, whose tests share what they build; one worker all tests that share servers."""

    def _split_scope(self, nodeid: str) -> str:
        path = Path(nodeid.partition("::")[0])
        return str(path.parent if path.parent.name == "e2e" else path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling | None:
    return FilesAndServers(config, log) if config.getvalue("dist") == "loadfile" else None


FAILED_AT_TEARDOWN = 10  # an exit code of ours
_failed_at_teardown: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and report.when == "teardown":
        _failed_at_teardown.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What fails there is a check of what many tests left behind, as in a server's log. The last of them alone would
    pass it, so `scripts/test` must not try that."""
    if _failed_at_teardown:
        session.exitstatus = FAILED_AT_TEARDOWN


@pytest.fixture(autouse=True, scope="module")
def programs_as_served(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("optimized") is None:
        yield
        return
    import jax  # after the environment above

    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True)
def forget_what_slow_tests_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whole engines and meshes, which would otherwise stay until the process ends."""
    yield
    if request.node.get_closest_marker("slow") is not None:
        forget_programs()


@pytest.fixture(autouse=True, scope="module")
def forget_many_programs() -> Iterator[None]:
    """A process may have 65,530 mappings of memory, of which a program takes up to hundreds; one worker may run all."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > 30_000:
        forget_programs()


def forget_programs() -> None:
    import jax  # after the environment above

    from serving.runner.compiler import return_freed_memory

    gc.collect()
    jax.clear_caches()
    return_freed_memory()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for goldens: prompts and answers are token ids, but the engine wants some tokenizer all the same."""
    folder = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(Path(__file__).parent / "goldens" / "tokenizer" / "bpe.model", folder / "tokenizer.model")
    return str(folder)
