"""Fixtures for the whole tree."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

import certifi
import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

import waiting
from mlx_provider.upstream.runtime import preload_blas

# As under tox: nobody asks the network, where LiteLLM would wait and try again at each import.
os.environ |= {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
# As in an engine: products of float32 in the BLAS that is bundled with MLX are a fifth of the time
# of engines that run in this process. One thread, since tests run side by side.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
preload_blas()
# Rewritten assertions are kept for the next process.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# No test fails by the clock: a busy machine is no defect. Nor by chance: the suite has the same
# examples in each run, and the sweep draws others.
for profile, examples in (("suite", 12), ("sweep", 200)):
    settings.register_profile(
        profile,
        deadline=None,
        derandomize=profile == "suite",
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("suite")

InstallPlugin = Callable[..., str]
SHARING = "bench drafters families gateway litellm mtp parity proxy reproducible service wire"
WHOLE = {f"tests/{name}" for name in SHARING.split()}
"""Folders whose files share a proxy, an engine or loaded models."""


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "run without this plugin of ours, as if it were not installed"
    parser.addoption("--without-plugin", action="append", default=[], metavar="NAME", help=about)


@pytest.hookimpl(optionalhook=True)
def pytest_mlx_conformance_models(name: str) -> Mapping[str, Callable[[Path], object]]:
    """Random models of every architecture, for the checks of our own plugins."""
    return import_module("tiny").checkpoints_for(name)


def pytest_configure(config: pytest.Config) -> None:
    # As in an engine, before mlx is imported: on a GPU, float32 is otherwise not exact.
    import_module("mlx_provider.upstream.runtime").set_variables(None)
    if getattr(config.option, "numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        stack = ExitStack()
        stack.enter_context(import_module("kernel_compiler").compile_whole())
        config.add_cleanup(stack.close)


class FolderScheduling(LoadFileScheduling):
    """The tests of a folder that shares something stay in one process. Such folders run first, so
    that single files keep all processes busy until the end."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        folder = "/".join(file.split("/")[:2])
        return folder if folder in WHOLE else file

    def _assign_work_unit(self, node: WorkerController) -> None:
        folder = next((unit for unit in self.workqueue if unit in WHOLE), None)
        if folder is not None:
            self.workqueue.move_to_end(folder, last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FolderScheduling | None:
    """`--dist loadfile` keeps some folders whole, too."""
    return FolderScheduling(config, log) if config.getoption("dist") == "loadfile" else None


gc.disable()  # a third of the time of an import


def pytest_collection_finish() -> None:
    """What is imported stays: who looks for garbage does not go through it each time (0.4 s)."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup() -> None:
    """What a test draws with MLX is the same in each run. Else MLX begins by the clock."""
    if "mlx.core" in sys.modules:
        sys.modules["mlx.core"].random.seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """No test starts processes that ignore a signal, as the end of a long command leaves it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        return (yield)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def own_settings(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test sees the user's settings, nor the user's engine.

    The folder is short: the path of a unix socket has some hundred bytes.
    """
    folder = tempfile.mkdtemp(prefix="mlxp-")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("MLX_PROVIDER_")]:
            patch.delenv(name)
        patch.setenv("MLX_PROVIDER_RUNTIME_DIR", folder)
        patch.setenv("XDG_CONFIG_HOME", f"{folder}/config")
        patch.setenv("XDG_STATE_HOME", f"{folder}/state")
        patch.setenv("MLX_PROVIDER_DISK_CACHE_BYTES", "0")  # what one test computes, others compute
        # a busy machine is no defect, as above
        patch.setattr("mlx_provider.gateway.proxy.START_LIMIT", 900.0)
        # No test asks the network: a client of httpx that reads one certificate is made in 1 ms,
        # one that reads all in 20 ms.
        end = "-----END CERTIFICATE-----\n"
        certificate = Path(folder, "certificate.pem")
        certificate.write_text(Path(certifi.where()).read_text().split(end, 1)[0] + end)
        patch.setattr("certifi.where", lambda: str(certificate))
        # As in an engine: MLX's threads do not preempt the thread that wakes them.
        import_module("mlx_provider.upstream.runtime").use_batch_policy()
        # imported here: a process that only hands out tests needs no mlx
        few_passes = import_module("few_passes")
        for name, value in few_passes.FEW.items():
            patch.setattr(few_passes.calibration, name, value)
        patch.setattr(*few_passes.UNTIMED)
        left_out = set(request.config.getoption("--without-plugin"))
        if left_out:
            kept = entry_points(group="mlx_provider").names - left_out
            patch.setenv("MLX_PROVIDER_PLUGINS", ",".join(sorted(kept)))
        sharing = import_module("shared_measurements").share_measurements()
        with import_module("integrity").checked_steps(), sharing:
            yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def install_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstallPlugin:
    """Make a distribution with one plugin visible to importlib.metadata, without installing it.

    `install_plugin("mlx-provider-toy", source)` returns the plugin's name, `mlx_provider_toy`.
    """
    folder = tmp_path / "fake-site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def install(distribution: str, source: str, version: str = "1.0", name: str = "") -> str:
        module = distribution.replace("-", "_") + (f"_{name}" if name else "")
        # Set first, so that the end of the test takes away what it imports under this name.
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        monkeypatch.delitem(sys.modules, module)
        (folder / f"{module}.py").write_text(source)
        info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata)
        points = info / "entry_points.txt"
        entries = points.read_text() if points.exists() else "[mlx_provider]\n"
        points.write_text(f"{entries}{name or module} = {module}\n")
        return name or module

    return install


@pytest.fixture
def wait_until() -> Callable[[Callable[[], object]], object]:
    return waiting.wait_until
