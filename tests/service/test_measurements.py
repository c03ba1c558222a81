"""The next load of a model uses the measurements of an earlier one, if nothing has changed."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from mlx_provider.engine.scheduling.costs import UNMEASURED, Curve
from mlx_provider.engine.scheduling.costs import Load as CacheLoad
from mlx_provider.engine.scheduling.ledger import MemoryProfile
from mlx_provider.protocol.health import ModelStatus
from mlx_provider.protocol.requests import ModelOptions
from mlx_provider.serving import engine_builder, measurements
from mlx_provider.serving.calibration import NOT_FASTER, Measured
from mlx_provider.serving.measurements import Measurements, decoding
from mlx_provider.serving.probe import Probe
from mlx_provider.serving.weights import ModelView
from mlx_provider.settings import EngineSettings

PROBE = Probe("grouped", MemoryProfile(8, 64, ((24, 16),)), ("a note",), True, 0.031)
MEASURED = Measured(PROBE, Curve(((1, 0.001), (8, 0.002)), ((1, 1e-9),), drafts=((3, 0.001),)))

KNOWN: dict[tuple[Any, ...], Any] = {}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "measurements.json"


@pytest.mark.parametrize("curve", [UNMEASURED, MEASURED.curve], ids=["unmeasured", "measured"])
def test_a_measurement_read_back_from_json_is_unchanged(curve: Curve) -> None:
    measured = replace(MEASURED, curve=curve)
    adapter = TypeAdapter(Measured)
    read = adapter.validate_json(adapter.dump_json(measured))
    assert read == measured
    assert read.lasts == measured.lasts == (curve is not UNMEASURED)


# -- loading a model


Load = Callable[..., ModelView]


@pytest.fixture
def load(make_service: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a model in a separate service; `load.measured` counts its measurements. Equal ones are
    computed once: all models are the same here."""
    counted: list[str] = []
    services: list[Any] = []

    def counting(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any) -> Any:
            counted.append(name)
            key = name, repr(args[2:-1]), type(args[1]()[0])
            return KNOWN[key] if key in KNOWN else KNOWN.setdefault(key, original(*args))

        monkeypatch.setattr(module, name, call)

    counting(engine_builder, "probe")
    counting(engine_builder, "calibrate")

    def run(folder: Path, options: ModelOptions | None = None, **settings: Any) -> ModelView:
        counted.clear()
        service, _ = make_service(**{"measurements": str(file), **settings})
        services.append(service)
        view, lease = service.models.use(str(folder), options or ModelOptions())
        lease.release()
        return view

    def calibrate(make: Callable[[Probe], Measured]) -> None:
        monkeypatch.setattr(engine_builder, "calibrate", lambda a, b, found, d: make(found))

    run.measured, run.services = counted, services  # type: ignore[attr-defined]
    run.calibrate = calibrate  # type: ignore[attr-defined]
    return run


@pytest.fixture(scope="module")
def folder(build_tiny: Any) -> Path:
    return build_tiny("qwen3", head_dim=32, num_hidden_layers=1)


def test_the_second_load_measures_nothing(
    load: Any, folder: Path, file: Path, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    """The second load only reads the kernels that the first has compiled, as on a GPU."""
    caplog.set_level(logging.INFO, "mlx_provider")
    monkeypatch.setattr(engine_builder, "compiles", lambda: True)
    first = load(folder)
    assert load.measured == ["probe", "calibrate"]
    assert "compiling kernels, once on this machine" in caplog.text
    caplog.clear()
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))  # where compiled kernels are kept
    second = load(folder)
    assert load.measured == []
    assert "loading compiled kernels" in caplog.text
    assert "compiling" not in caplog.text
    assert second.weights.instance.probe == first.weights.instance.probe
    assert second.engine.scheduler.costs.curve == first.engine.scheduler.costs.curve
    assert (second.engine.batch.layout.name, second.engine.batch.mixes) == ("grouped", True)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("ending", ["unload", "close"])
@pytest.mark.parametrize("factor", [2.0, 0.5, 1.2])
def test_corrected_times_are_those_of_the_next_load_which_measures_nothing(
    load: Any, folder: Path, ending: str, factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    """So a busy machine makes no later load slow."""
    before = slow_down(view := load(folder), factor)
    curve = view.engine.scheduler.costs.curve
    assert (curve != before) == (factor != 1.2)
    with caplog.at_level(logging.INFO, "mlx_provider"):
        leave(load, view, ending)
    told = f"{folder}: the corrected times are kept for the next load" in caplog.messages
    assert told == (curve != before)
    assert load(folder).engine.scheduler.costs.curve == curve
    assert load.measured == []


def test_fixed_passes_correct_no_times_of_others(load: Any, folder: Path) -> None:
    before = slow_down(view := load(folder, ModelOptions(reproducible=True)), 2.0)
    leave(load, view, "unload")
    assert load(folder).engine.scheduler.costs.curve == before
    assert load.measured == []


def slow_down(view: ModelView, factor: float) -> Curve:
    """Passes of prompts take so many times as long. Returns the curve before."""
    costs = view.engine.scheduler.costs
    before, seconds = costs.curve, costs.pass_of(0, 0, 64, 50_000)
    for _ in range(50):
        expected = costs.pass_of(0, 0, 64, 50_000)
        costs.update(expected, factor * seconds, [CacheLoad(0, 64, 50_000)])
    return before


def leave(load: Any, view: ModelView, ending: str) -> None:
    service = load.services[-1]
    service.models.loader.unload(view.weights) if ending == "unload" else service.close()


@pytest.mark.parametrize(
    "change", ["weights", "kv_bits", "layout", "upstream", "version", "device", "plugin", "switch"]
)
def test_a_changed_model_is_measured_again(
    load: Any, build_tiny: Any, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    own = build_tiny("qwen3", head_dim=32, num_hidden_layers=1)
    load(own)
    options, settings = None, {}
    if change == "weights":
        os.utime(own / "model.safetensors", ns=(1, 1))
    elif change == "kv_bits":
        options = ModelOptions(kv_bits=8)
    elif change == "layout":
        settings["kv_layout"] = "merged"
    elif change == "upstream":
        monkeypatch.setattr(measurements, "installed_version", lambda package: "99")
    elif change == "version":
        monkeypatch.setattr(measurements, "__version__", "99")
    elif change == "device":
        info = {"device_name": "another", "architecture": "another"}
        monkeypatch.setattr(measurements.mx, "device_info", lambda: info)
    elif change == "plugin":
        from mlx_provider.registry.discovery import Plugin

        monkeypatch.setattr(Plugin, "__str__", lambda plugin: f"{plugin.name} 99")
    else:
        monkeypatch.setenv("MLX_ENABLE_TF32", "1")
    load(own, options, **settings)
    assert load.measured == ["probe", "calibrate"]
    load(own, options, **settings)
    assert load.measured == []


def test_measurements_can_be_switched_off(load: Any, folder: Path, file: Path) -> None:
    for _ in range(2):
        load(folder, measurements="off")
        assert load.measured == ["probe", "calibrate"]
    assert not file.parent.exists()


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("}", ""),
        ('"widths":', '"widths":[],"was":'),
        ('"first":0.0', '"first":NaN'),
        ('"widths":[', '"widths":[[0,0],'),
    ],
)
def test_a_broken_file_is_replaced_by_new_measurements(
    load: Any, folder: Path, file: Path, part: str, wrong: str
) -> None:
    load(folder)
    written = file.read_text()
    assert part in written
    file.write_text(written.replace(part, wrong))
    load(folder)
    assert load.measured == ["probe", "calibrate"]
    load(folder)
    assert load.measured == []


def test_the_status_reports_how_rows_decode(load: Any, folder: Path) -> None:
    for layout, begins in (
        ("auto", "rows decode together (grouped), with chunks of prompts, log-probabilities"),
        ("merged", "rows decode together (merged), apart from chunks of prompts, log-prob"),
        ("solo", "rows decode alone"),
    ):
        served = load(folder, kv_layout=layout)
        status: ModelStatus = served.status
        assert decoding(status).startswith(begins)
        assert status.mixed_prefill is (layout == "auto")
        assert status.noise_floor == served.weights.instance.probe.noise_floor < 1e-3


def test_the_status_names_the_padded_layout(load: Any, folder: Path) -> None:
    load.calibrate(lambda found: replace(MEASURED, probe=replace(found, layout="padded")))
    served = load(folder)
    assert served.status.kv_layout == "padded"
    assert decoding(served.status).startswith("rows decode together (padded)")
    assert served.engine.batch.can_verify_drafts
    assert served.engine.batch.mixes


def test_rows_share_a_prefix_where_its_copies_would_fill_the_memory(
    load: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device where that is not faster."""
    load.calibrate(lambda found: replace(MEASURED, probe=found, least_shared=NOT_FASTER))
    policy, shared = engine_builder.PrefixCachePolicy, []

    def made(*given: Any, memory: MemoryProfile, min_shared: int, **more: Any) -> Any:
        shared.append(min_shared * memory.token_bytes < 2**23)
        return policy(*given, memory=memory, min_shared=min_shared, **more)

    monkeypatch.setattr(engine_builder, "PrefixCachePolicy", made)
    for memory in (2**25, 2**33):
        load(folder, memory_limit=memory, measurements="off")
    assert shared == [True, False]


def test_the_log_reports_at_load_how_rows_decode(
    load: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mlx_provider"):
        served = load(folder)
    assert f"{folder}: {decoding(served.status)}, drafts by lookup" in caplog.messages


# -- the file


def test_entries_are_separate_and_the_oldest_is_removed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurements, "ENTRIES", 3)
    kept = Measurements(file)
    for name in "abcad":
        kept.keep(name, replace(MEASURED, probe=replace(PROBE, notes=(name,))))
    found = {name: kept.find(name) for name in "abcd"}
    assert found["b"] is None
    assert {n: f.probe.notes for n, f in found.items() if f} == {n: (n,) for n in "acd"}
    assert found["a"] == replace(MEASURED, probe=replace(PROBE, notes=("a",)))


@pytest.mark.parametrize(
    "measured",
    [
        replace(MEASURED, curve=UNMEASURED),
        replace(MEASURED, probe=replace(PROBE, conclusive=False)),
    ],
    ids=["not timed", "a layout failed"],
)
def test_a_result_of_a_passing_failure_is_not_stored(file: Path, measured: Measured) -> None:
    Measurements(file).keep("key", measured)
    assert Measurements(file).find("key") is None


def planted_link(file: Path) -> None:
    (file.parent / "elsewhere").write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(file.parent / "elsewhere")


def planted_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def grown(file: Path) -> None:
    file.write_text(file.read_text() + " " * measurements.LARGEST)


def rewritten(file: Path, old: str, new: str) -> None:
    written = file.read_text()
    assert old in written
    file.write_text(written.replace(old, new))


PLANTED: dict[str, Callable[[Path], None]] = {
    "a link": planted_link,
    "a pipe": planted_pipe,
    "too large": grown,
    "no number": partial(rewritten, old="0.031", new='"much"'),
    "another name": partial(rewritten, old='"token_bytes"', new='"other_bytes"'),
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_a_planted_or_invalid_measurements_file_is_neither_read_nor_written_through(
    file: Path, plant: Callable[[Path], None]
) -> None:
    kept = Measurements(file)
    kept.keep("key", MEASURED)
    plant(file)
    elsewhere = file.parent / "elsewhere"
    before = elsewhere.read_bytes() if elsewhere.exists() else b""
    assert kept.find("key") is None
    kept.keep("key", MEASURED)
    assert kept.find("key") == MEASURED
    assert (elsewhere.read_bytes() if elsewhere.exists() else b"") == before


def test_another_users_file_is_not_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Measurements(file)
    kept.keep("key", MEASURED)
    monkeypatch.setattr(os, "getuid", lambda: file.stat().st_uid + 1)
    assert kept.find("key") is None
    kept.keep("other", MEASURED)
    monkeypatch.undo()
    assert kept.find("other") is None


def test_a_folder_with_write_access_for_others_is_not_used(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.parent.mkdir()
    file.parent.chmod(0o777)
    Measurements(file).keep("key", MEASURED)
    assert not list(file.parent.iterdir())
    assert "others may write to its folder" in caplog.text


def test_a_path_that_cannot_be_created_is_only_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    Measurements(tmp_path / "file" / "below").keep("key", MEASURED)
    assert "cannot be stored" in caplog.text


def test_the_setting_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    Measurements.at("off", environ).keep("key", MEASURED)
    assert [*tmp_path.iterdir()] == []
    for value, expected in (
        (EngineSettings().measurements, "state/mlx-provider/measurements.json"),
        ("~/measured", "measured"),
    ):
        Measurements.at(value, environ).keep("key", MEASURED)
        assert (tmp_path / expected).is_file()
