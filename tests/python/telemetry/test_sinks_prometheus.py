"""The Prometheus page, checked by promtool and scraped by a real Prometheus."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from intervals import KEYS, interval, without
from tenure.telemetry.sinks import Prometheus

pytest.importorskip("prometheus_client", reason="the client is not installed")
PROMTOOL = shutil.which("promtool")
PROMETHEUS = shutil.which("prometheus")
needs = "Debian's package prometheus is not installed"


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[Prometheus]:
    monkeypatch.delenv("ROLE_NAME", raising=False)
    made = Prometheus(port=0, run_name="first")
    made.open()
    yield made
    made.close()


def page(sink: Prometheus) -> str:
    url = f"http://127.0.0.1:{sink.port}/metrics"
    with urllib.request.urlopen(url, timeout=20) as answer:
        return str(answer.read().decode())


def series(text: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_it_has_every_figure_in_base_units_with_the_rank_that_has_it(sink: Prometheus) -> None:
    assert series(page(sink)) == {}, "before the first interval"
    figures = interval(10, alerts=("headroom < 5 %",), dropped=3)
    sink.write(figures)
    text = page(sink)
    found = series(text)
    everyone = 'role="default",stage="all"'
    assert found[f"tenure_device_allocated_bytes{{{everyone}}}"] == 60_040_000_001
    assert found['tenure_device_allocated_bytes{role="default",stage="1"}'] < 41e9
    assert found[f'tenure_figure_rank{{figure="device_allocated_bytes",{everyone}}}'] == 2
    assert found[f"tenure_device_headroom_ratio{{{everyone}}}"] == 0.249
    assert found[f"tenure_step_seconds{{{everyone}}}"] == 1.500003
    assert found[f"tenure_device_ooms_total{{{everyone}}}"] == 150
    assert found['tenure_rank_device_headroom_ratio{rank="3",role="default"}'] == 0.499
    assert found['tenure_dropped_intervals_total{role="default"}'] == 3
    assert found['tenure_alerts{role="default"}'] == 1
    assert found['tenure_updated_timestamp_seconds{role="default"}'] == figures.time
    assert found['tenure_run_info{rank="0",role="default",run="first"}'] == 1
    for key in KEYS:
        assert f'figure="{key.name}"' in text
    assert "# TYPE tenure_device_retries_total counter" in text
    assert (
        "# HELP tenure_host_rss_bytes Resident memory of the process, highest among ranks" in text
    )


def test_rows_that_do_not_come_any_more_are_not_told(sink: Prometheus) -> None:
    sink.write(interval(10))
    for step in range(20, 120, 10):
        sink.write(interval(step, rows={}))
    assert "tenure_rank_host_rss_bytes{" in page(sink)
    for step in range(120, 320, 10):
        sink.write(interval(step, rows={}))
    assert "tenure_rank_" not in page(sink)


def test_rows_stay_until_the_next_and_what_is_not_there_is_not_told(sink: Prometheus) -> None:
    sink.write(without(interval(10), "device"))
    sink.write(without(interval(20, rows={2: {}}), "device"))
    assert "tenure_device" not in page(sink)
    sink.write(interval(30))
    sink.write(interval(40, rows={}))
    assert 'tenure_rank_host_rss_bytes{rank="3",role="default"}' in series(page(sink))


def test_the_number_of_series_has_a_limit(sink: Prometheus) -> None:
    sink.write(interval(ranks=100, stages=100))
    found = series(page(sink))
    assert len(found) < 2 * len(KEYS) * 65 + 20
    assert 'tenure_step{role="default",stage="63"}' in found
    assert 'tenure_step{role="default",stage="64"}' not in found
    assert not any(name.startswith("tenure_rank_") for name in found)


def test_the_role_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLE_NAME", "actor")
    sink = Prometheus(port=0)
    sink.open()
    sink.write(interval())
    text = page(sink)
    sink.close()
    assert 'role="actor"' in text


def test_nobody_else_reaches_it_and_a_forked_child_does_not_keep_the_port() -> None:
    sink = Prometheus(port=0)
    port = sink.port
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    sink.open()
    sink.close()
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) != 0, "the child listens"
    Prometheus(port=port).close()
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0
    other = Prometheus(port=0)
    assert other._server.server_address[0] == "127.0.0.1"
    other.close()


@pytest.mark.skipif(PROMTOOL is None, reason=needs)
def test_promtool_has_nothing_to_say(sink: Prometheus) -> None:
    sink.write(interval())
    assert PROMTOOL is not None
    checked = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=page(sink), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.skipif(PROMETHEUS is None, reason=needs)
def test_a_real_prometheus_scrapes_it(sink: Prometheus, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "scrape_configs: [{job_name: t, scrape_interval: 100ms, scrape_timeout: 100ms, "
        f"static_configs: [{{targets: ['127.0.0.1:{sink.port}']}}]}}]"
    )
    sink.write(interval(10))
    assert PROMETHEUS is not None
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={config}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        query = 'tenure_device_allocated_bytes{stage="all"}'
        (found,) = answer(port, query, lambda found: len(found) == 1, tmp_path / "log")
        assert found["metric"]["role"] == "default"
        assert float(found["value"][1]) == 60_040_000_001

        # Another rank is highest: the series is the same.
        sink.write(interval(20, ranks=8))
        answer(port, "tenure_peak_rank", lambda f: f[0]["value"][1] == "6", tmp_path / "log")
        past = f"count_over_time({query}[1m])"
        assert len(answer(port, past, bool, tmp_path / "log")) == 1
        name = "tenure_device_retries"  # it asks for OpenMetrics, which names counters so
        (kind,) = ask(port, "metadata", metric=name)[name]
        assert kind["type"] == "counter"
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)


def answer(port: int, query: str, is_right: Any, log: Path) -> list[Any]:
    """The result of a query, once it is there."""
    deadline = time.monotonic() + 30
    found: list[Any] = []
    while time.monotonic() < deadline:
        try:
            found = ask(port, "query", query=query)["result"]
        except OSError:
            continue
        if found and is_right(found):
            return found
        time.sleep(0.05)  # between looks
    raise AssertionError(f"{query}: {found}\n{log.read_text()}")


def ask(port: int, what: str, **options: str) -> Any:
    url = f"http://127.0.0.1:{port}/api/v1/{what}?{urllib.parse.urlencode(options)}"
    with urllib.request.urlopen(url, timeout=10) as answered:
        return json.load(answered)["data"]
