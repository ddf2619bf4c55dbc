"""W&B, MLflow and Comet: what was written, read back with what they bring."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from intervals import interval
from tenure.errors import InputError
from tenure.telemetry import compat
from tenure.telemetry.figures import Figures
from tenure.telemetry.sinks import MLflow, Sink, WandB, made, plain

STEPS = (10, 20)


SETTINGS = """
    WANDB_MODE WANDB_API_KEY WANDB_PROJECT
    MLFLOW_TRACKING_URI MLFLOW_RUN_ID MLFLOW_EXPERIMENT_NAME
    COMET_API_KEY COMET_OFFLINE_DIRECTORY COMET_PROJECT_NAME
"""


@pytest.fixture(autouse=True)
def nobody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS.split():
        monkeypatch.delenv(name, raising=False)


def write(sink: Sink, *figures: Figures) -> None:
    sink.open()
    for one in figures:
        sink.write(one)
    sink.close()


# W&B


def wandb_records(folder: Path) -> list[Any]:
    """The records of an offline run, which W&B's own process goes on writing after it has ended."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        records = list(parsed(path.read_bytes()))
        if records and records[-1].HasField("exit"):
            return records
        time.sleep(0.05)  # between looks
    raise AssertionError("the run has no end")


def parsed(data: bytes) -> Iterator[Any]:
    """W&B's messages: a LevelDB log behind a header of its own."""
    from wandb.proto import wandb_internal_pb2

    assert data[:4] in {b":W&B", b""}
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):
            return
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:  # the record is whole, or this was its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def wandb_rows(records: list[Any]) -> list[dict[str, Any]]:
    return [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in r.history.item}
        for r in records
        if r.HasField("history")
    ]


def test_wandb_has_the_intervals_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the client is not installed")
    (sink,) = made("wandb", folder=tmp_path, run_name="first")
    write(sink, *map(interval, STEPS))
    records = wandb_records(tmp_path)
    rows = wandb_rows(records)
    assert [row["_step"] for row in rows] == list(STEPS)
    for step, row in zip(STEPS, rows, strict=True):
        assert {name: row[name] for name in plain(interval())} == plain(interval(step))
        assert type(row["memory/device_allocated_bytes"]) is int
    (run,) = [record.run for record in records if record.HasField("run")]
    assert (run.display_name, run.project) == ("first", "tenure")


def test_wandb_joins_the_run_that_the_program_has_begun(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="the client is not installed")
    run = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True))
    run.log({"loss": 1.0})
    write(WandB(tmp_path, names=compat.megatron_bridge), *map(interval, STEPS))
    run.log({"loss": 0.5})
    run.finish()
    records = wandb_records(tmp_path)
    rows = wandb_rows(records)
    assert [row["loss"] for row in rows if "loss" in row] == [1.0, 0.5]
    assert [row["tenure_step"] for row in rows if "tenure_step" in row] == list(STEPS)
    drawn = {r.metric.name: r.metric.step_metric for r in records if r.HasField("metric")}
    assert drawn["memory/mem-alloc-retires"] == "tenure_step"


def test_wandb_leaves_the_programs_run_to_the_program(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="the client is not installed")
    sink = WandB(tmp_path / "ours")
    sink.open()  # a monitor that was made first, as the trainer begins its run later
    run = wandb.init(
        project="theirs", mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True)
    )
    assert (run.project, wandb.run) == ("theirs", run)
    sink.write(interval(10))
    sink.close()
    run.log({"loss": 0.5})
    run.finish()
    rows = wandb_rows(wandb_records(tmp_path))
    assert [row["tenure_step"] for row in rows if "tenure_step" in row] == [10]
    assert [row["loss"] for row in rows if "loss" in row] == [0.5]


# Comet


def comet_metrics(folder: Path) -> dict[str, list[tuple[int, str]]]:
    (path,) = folder.glob("*.zip")
    found: dict[str, list[tuple[int, str]]] = {}
    with zipfile.ZipFile(path) as archive:
        for line in archive.read("messages.json").splitlines():
            message = json.loads(line)
            if message["type"] == "metric_msg":
                told = message["payload"]["metric"]
                found.setdefault(told["metricName"], []).append((told["step"], told["metricValue"]))
    return found


def test_comet_has_the_intervals_in_its_archive(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml", reason="the client is not installed")
    # In a process of its own: comet_ml changes how other packages are imported.
    program = (
        "from pathlib import Path; from intervals import interval; "
        "from tenure.telemetry.sinks import made; import sys\n"
        "(sink,) = made('comet', folder=Path(sys.argv[1]), run_name='first'); sink.open()\n"
        "sink.write(interval(10)); sink.write(interval(20)); sink.close()"
    )
    folder = str(Path(__file__).resolve().parents[1])
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r})\n{program}", tmp_path],
        check=True,
    )
    found = comet_metrics(tmp_path / "comet")
    expected = {step: plain(interval(step)) for step in STEPS}
    for name in expected[10]:
        assert found.pop(name) == [(step, expected[step][name]) for step in STEPS], name
    assert set(found) <= {"process duration"}, "what Comet adds by itself"


def test_comet_begins_no_experiment_before_there_is_something_to_write(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml", reason="the client is not installed")
    program = (
        "from pathlib import Path; import comet_ml, sys; from tenure.telemetry.sinks import Comet\n"
        "sink = Comet(Path(sys.argv[1])); sink.open()\n"
        "assert comet_ml.get_running_experiment() is None; sink.close()"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True)


# MLflow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A tracking server on loopback."""
    pytest.importorskip("mlflow.server", reason="not installed whole", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("server")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    words = ["-m", "mlflow", "server", "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{folder}/server.db"]
    artifacts = ["--default-artifact-root", str(folder / "artifacts")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *words, "--port", str(port), *store, *artifacts],
            stdout=log,
            stderr=log,
        )
    deadline = time.monotonic() + 300
    while not is_healthy(uri):
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.2)  # between looks
    yield uri
    process.terminate()
    process.wait(30)


def is_healthy(uri: str) -> bool:
    try:
        with urllib.request.urlopen(f"{uri}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def mlflow_client(uri: str) -> Any:
    return pytest.importorskip("mlflow").MlflowClient(tracking_uri=uri)


def test_mlflow_has_the_intervals_on_a_server(server: str) -> None:
    sink = MLflow(server, experiment="first", run_name="one")
    write(sink, *map(interval, STEPS))
    client = mlflow_client(server)
    experiment = client.get_experiment_by_name("first")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("one", "FINISHED")
    assert run.data.metrics == plain(interval(20))
    points = client.get_metric_history(run.info.run_id, "memory/device_allocated_bytes")
    assert [(p.step, p.timestamp) for p in points] == [
        (step, round(interval(step).time * 1000)) for step in STEPS
    ]


def test_mlflow_goes_on_in_a_run_that_is_there(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = mlflow_client(server)
    run_id = client.create_run("0").info.run_id
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    wide = interval(10, ranks=32, stages=32)  # more names than MLflow takes at once
    assert len(plain(wide)) > 1000
    write(MLflow(run_id=run_id), wide)
    write(MLflow(run_id=run_id, names=compat.megatron_bridge), interval(10))
    run = client.get_run(run_id)
    assert run.info.status == "RUNNING"
    assert run.data.metrics == {**plain(wide), **compat.megatron_bridge_in_mlflow(interval(10))}


def test_mlflow_without_a_server_has_a_store_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("mlflow.server", reason="not installed whole", exc_type=ImportError)
    (sink,) = made("mlflow", folder=tmp_path, run_name="one")
    write(sink, interval(10))
    assert isinstance(sink, MLflow)
    client = mlflow_client(sink.uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tenure").experiment_id])
    assert run.data.metrics == plain(interval(10))
    assert str(tmp_path) in run.info.artifact_uri


def test_mlflow_skinny_without_a_server_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", sys.modules.get("mlflow") or pytest)
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(InputError, match="set MLFLOW_TRACKING_URI to a server"):
        MLflow(folder=tmp_path)
    assert MLflow("http://127.0.0.1:1").uri == "http://127.0.0.1:1"
