"""What may be asked for as a sink, and those that need no client: console, jsonl, compat."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from intervals import KEYS, interval, without
from tenure.errors import InputError
from tenure.telemetry import compat, sinks
from tenure.telemetry.figures import Figure, Figures
from tenure.telemetry.sinks import Console, JsonLines, Prometheus, Sink, made, plain


def make(spec: Any, folder: Path) -> list[Sink]:
    return made(spec, folder=folder, run_name="run")


def test_names_functions_and_objects_are_sinks(tmp_path: Path) -> None:
    got: list[Figures] = []
    own = JsonLines(tmp_path / "own.jsonl")
    found = make(["console", got.append, own], tmp_path)
    assert [sink.name for sink in found] == ["console", "append", "jsonl"]
    assert found[2] is own
    found[1].open()
    found[1].write(interval())
    found[1].close()
    assert got == [interval()]
    assert [sink.name for sink in make("console", tmp_path)] == ["console"]
    assert make([], tmp_path) == []


def test_a_function_may_change_what_it_is_given(tmp_path: Path) -> None:
    (sink,) = make(lambda figures: figures.world.clear(), tmp_path)
    given = interval()
    sink.write(given)
    assert given == interval()


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("consle", "no sink 'consle': there are console, tensorboard, wandb, mlflow, comet, prom"),
        (["console", 3], "a sink is one of console, .* and not a int"),
        ([Console], "the sink Console is a class: give one of it, Console()"),
        (sys.stderr, "an object with name, open(), write() and close(), and not a"),
    ],
    ids=["unknown", "number", "class", "file"],
)
def test_what_is_no_sink_is_refused(tmp_path: Path, spec: object, told: str) -> None:
    with pytest.raises(InputError, match=told.replace("()", r"\(\)")):
        make(spec, tmp_path)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("tensorboard", "tensorboard"),
        ("wandb", "wandb"),
        ("mlflow", "mlflow"),
        ("comet", "comet_ml"),
        ("prometheus", "prometheus_client"),
    ],
)
def test_a_client_that_is_not_installed_is_told_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=f"needs {module}, .* -m pip install {module}$"):
        make(name, tmp_path)


def test_making_sinks_imports_no_client(tmp_path: Path) -> None:
    program = """
        import sys
        from pathlib import Path
        from tenure.telemetry import sinks
        for name in sinks.NAMES:
            try:
                sinks.made(name, folder=Path(sys.argv[1]), run_name="run")
            except sinks.InputError as error:
                assert "not installed" in str(error) or "port" in str(error), error
        clients = {"tensorboard", "wandb", "mlflow", "comet_ml", "prometheus_client"}
        assert not clients & set(sys.modules), clients & set(sys.modules)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", ["jsonl", "tensorboard", "wandb", "mlflow", "comet"])
def test_a_folder_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in ("tensorboard", "wandb", "mlflow", "sqlalchemy", "comet_ml"):  # as if installed
        monkeypatch.setitem(sys.modules, module, sys.modules.get(module) or pytest)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(InputError, match=f"the sink {name} cannot write to .*: give it another"):
        make(name, taken)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_folder_on_a_file_system_that_is_read_only_is_refused(read_only: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write to .*Read-only file system"):
        make("jsonl", read_only)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this container may not mount")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_file_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write to .*Is a directory.*another file"):
        JsonLines(tmp_path)


def test_a_port_in_use_is_refused_and_what_was_made_before_is_given_back(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="not installed")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot listen at 127.0.0.1 port {port} .*in use"):
            Prometheus(port)
    first = Prometheus(port)
    first.close()
    Prometheus(port).close()
    with pytest.raises(InputError, match="port 70000"):
        Prometheus(70000)
    with pytest.raises(InputError, match="cannot listen at no.such.host"):
        Prometheus(0, "no.such.host")
    if port_is_free(9464):
        with pytest.raises(InputError, match="there is no sink"):
            make(["prometheus", "no such"], tmp_path)
        assert port_is_free(9464)


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_plain_names_end_in_units_and_none_is_inside_another() -> None:
    named = plain(interval(ranks=8, stages=2))
    assert (
        named["memory/device_allocated_bytes"]
        == interval(ranks=8).world["device_allocated_bytes"].value
    )
    assert named["memory_rank/device_allocated_bytes"] == 6
    assert named["memory_stage_1/device_allocated_bytes"] < named["memory/device_allocated_bytes"]
    assert all(type(value) is int for value in named.values())
    assert len(named) == 4 * len(KEYS) + 3
    assert not any(a != b and b.startswith(a + "/") for a in named for b in named)


def console(figures: Figures, capsys: pytest.CaptureFixture[str], **options: int) -> list[str]:
    sink = Console(**options)
    sink.open()
    sink.write(figures)
    sink.close()
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_the_console_has_a_line_an_interval(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = console(interval(1200), capsys)
    assert line == (
        "step 1200 · device 60,040.0 MB on rank 2, stage 0 · headroom 24.9 % on rank 2 · "
        "+1.2 MB/step · full at step 4,200 (3,700 to 5,200) on rank 0"
    )


def test_a_range_of_the_forecast_is_one_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    given = interval(1200)
    latest = given.world["steps_left_latest"]
    mixed = replace(given, world=given.world | {"steps_left_latest": replace(latest, rank=1)})
    assert console(mixed, capsys)[0].endswith("full at step 4,200 on rank 0")


def test_the_console_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    cpu = without(interval(5, ranks=1, stages=1), "device", "steps_left")
    told = replace(cpu, alerts=("headroom < 5 %: \x1b[31mrank 2\nhas 4 %",), dropped=2)
    line, alert = console(told, capsys)
    assert line.startswith("step 5 · host ")
    assert "rank" not in line
    assert line.endswith("/step · 2 intervals lost by slow sinks")
    assert alert == "step 5 · alert: headroom < 5 %: �[31mrank 2 has 4 %"
    assert console(replace(interval(), world={}), capsys) == ["step 10"]
    assert [len(line) for line in console(interval(), capsys, width=40)] == [40]


def written(path: Path, *figures: Figures, **options: Any) -> list[dict[str, Any]]:
    sink = JsonLines(path, **options)
    sink.open()
    for one in figures:
        sink.write(one)
    lines = path.read_text().splitlines()  # before it is closed
    sink.close()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def test_jsonl_has_all_that_is_known(tmp_path: Path) -> None:
    figures = interval(alerts=("headroom < 5 %",), dropped=1)
    first, second = written(tmp_path / "new" / "m.jsonl", figures, replace(figures, rows={}))
    assert first["world"]["device_allocated_bytes"] == {"value": 60_040_000_001, "rank": 2}
    assert first["stages"]["1"]["step"] == {"value": 10, "rank": 1}
    assert first["rows"]["3"] == figures.rows[3]
    assert (first["alerts"], first["dropped"], first["ranks"]) == (["headroom < 5 %"], 1, 4)
    assert "rows" not in second
    assert second["time"] == figures.time


def test_jsonl_goes_on_after_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"ste')
    assert [line["step"] for line in written(path, interval(2), interval(3))] == [1, 2, 3]
    assert path.read_text().splitlines()[1] == '{"ste'


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_jsonl_on_a_disk_that_fills_up_and_is_cleared(full_disk: Path) -> None:
    sink = JsonLines(full_disk / "m.jsonl")
    sink.open()
    with pytest.raises(OSError, match="No space left"):
        for step in range(1000):
            sink.write(interval(step))
    (full_disk / "ballast").unlink()
    sink.write(interval(2000))
    sink.close()
    lines = (full_disk / "m.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if line.endswith("}")]
    assert steps == [*range(len(steps) - 1), 2000]
    assert len(steps) > 1


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this container may not mount")
    (tmp_path / "ballast").write_bytes(bytes(128 << 10))
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_megatron_bridge_has_its_names_units_and_rounding(tmp_path: Path) -> None:
    figures = interval()
    named = compat.names_like("megatron-bridge")(figures)
    gigabytes = {
        f"memory/mem-{top}{kind}-gigabytes"
        for top in ("", "max-")
        for kind in ("allocated", "active", "inactive", "reserved")
    }
    counts = {"memory/mem-alloc-retires", "memory/mem-allocated-count"}
    assert set(named) == gigabytes | counts
    blocks = named["memory/mem-allocated-count"]
    assert (type(blocks), blocks) == (int, figures.world["device_blocks"].value)
    assert named["memory/mem-allocated-gigabytes"] == 60.04
    retries = named["memory/mem-alloc-retires"]
    assert (type(retries), retries) == (int, figures.world["device_retries"].value)
    assert "memory_mem-alloc-retires" in compat.megatron_bridge_in_mlflow(figures)
    # No device: nothing, rather than zeros.
    assert compat.megatron_bridge(without(figures, "device")) == {}
    (line,) = written(tmp_path / "m.jsonl", figures, names=compat.megatron_bridge)
    assert line == {"step": 10, "time": figures.time, **named}


@pytest.mark.parametrize(
    ("nbytes", "gigabytes"),
    [(0, 0.0), (1, 1e-09), (123_456_789, 0.12346), (79_999_999_999, 80.0), (99_999_499, 0.099999)],
)
def test_megatron_bridge_rounds_to_five_digits(nbytes: int, gigabytes: float) -> None:
    world = {"device_reserved_top_bytes": Figure(nbytes, 0)}
    (value,) = compat.megatron_bridge(interval(world=world)).values()
    assert (type(value), value) == (float, gigabytes)


def test_compat_with_what_is_not_known_is_refused() -> None:
    with pytest.raises(InputError, match="compat 'megatron' is not known: there is megatron-brid"):
        compat.names_like("megatron")


def test_compat_reaches_sinks_by_name(tmp_path: Path) -> None:
    (sink,) = sinks.made(
        "jsonl", folder=tmp_path, run_name="run", names=compat.names_like("megatron-bridge")
    )
    sink.open()
    sink.write(interval())
    sink.close()
    (line,) = (tmp_path / "memory.jsonl").read_text().splitlines()
    assert "memory/mem-alloc-retires" in json.loads(line)
