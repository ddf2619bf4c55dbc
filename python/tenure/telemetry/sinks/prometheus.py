"""Prometheus: a page that a server scrapes, with the figures of the last interval."""

from __future__ import annotations

import importlib
import os
import socket
import socketserver
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from tenure.errors import InputError
from tenure.telemetry.figures import Figures, Key, Row
from tenure.telemetry.sinks.sink import need_package

__all__ = ["Prometheus"]

_STAGES = 64
_OLD = 25  # intervals after which rows that ranks do not show any more are not told either
_ROW_KEYS = (
    "device_allocated_bytes",
    "device_reserved_bytes",
    "device_headroom_permille",
    "host_rss_bytes",
    "host_headroom_permille",
)
# Prometheus has base units: the ending of the name, and by what a figure is divided.
_UNITS = {"permille": ("ratio", 1000), "microseconds": ("seconds", 1_000_000)}
_COUNTERS = {"device_retries", "device_ooms"}


class Prometheus:
    """``http://127.0.0.1:9464/metrics``. Any path does.

    Names are ``tenure_`` and the key, in base units: bytes, seconds, and ratios for permilles
    (``tenure_device_headroom_ratio``); counters end in ``_total``.

    Labels: ``stage`` is ``all`` or a pipeline stage's number, ``role`` what this job is among
    others. *Which* rank has a figure is a figure itself, ``tenure_figure_rank{figure="…"}``, and no
    label of it: the rank changes from interval to interval, each change would end one series and
    begin another, and in a week there would be one for every rank. ``rank`` is a label where it
    stays: ``tenure_rank_…``, five figures of each rank (from the intervals that have them all), for
    jobs of up to `ranks` ranks.

    So the number of series has a limit: two for each key and stage, of which at most 64 are told,
    five for each rank, and a handful.

    Nobody but this machine reaches it, unless `host` says otherwise. It has no password.
    """

    name = "prometheus"

    def __init__(
        self,
        port: int = 9464,
        host: str = "127.0.0.1",
        *,
        role: str | None = None,
        ranks: int = 64,
        run_name: str = "",
    ) -> None:
        """Takes the port now, so that one in use is known before training starts.

        Args:
            port: 0 for any that is free; see `port`.
            host: The address to listen at: ``0.0.0.0`` for all of this machine's.
            role: The label; None for ``ROLE_NAME``, which torchrun sets, else ``default``.
            ranks: Up to how many ranks are told one by one.
            run_name: A label of ``tenure_run_info``.

        Raises:
            InputError: If prometheus_client is not installed or the port cannot be had.
        """
        need_package("prometheus_client", "prometheus_client", self.name)
        self._role = role or os.environ.get("ROLE_NAME") or "default"
        self._ranks = ranks
        self._run_name = run_name
        self._last: Figures | None = None
        self._rows: Mapping[int, Row] = {}
        self._old = 0  # intervals since
        self._metrics: Any = None
        self._server = _bound(host, port)
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def open(self) -> None:
        """Begins to answer. A scrape that came before has waited."""
        client: Any = importlib.import_module("prometheus_client")
        self._metrics = importlib.import_module("prometheus_client.core")
        registry = client.CollectorRegistry(auto_describe=False)
        registry.register(self)
        handler = client.exposition.MetricsHandler.factory(registry)
        handler.timeout = 10  # for a client that connects and asks nothing
        self._server.RequestHandlerClass = handler
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="tenure-prometheus", daemon=True
        )
        self._thread.start()

    def write(self, figures: Figures) -> None:
        """Keeps the interval for the next scrape."""
        self._old = 0 if figures.rows else self._old + 1
        if figures.rows or self._old > _OLD:
            self._rows = figures.rows
        self._last = figures

    def close(self) -> None:
        """Gives the port back."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()

    def collect(self) -> Iterator[Any]:
        """What `prometheus_client` asks at each scrape: the last interval as metric families."""
        last = self._last
        if last is None:
            return
        stages = sorted(last.stages.items())[:_STAGES]
        groups = [("all", last.world), *((str(stage), found) for stage, found in stages)]
        whose = self._gauge(
            "tenure_figure_rank", "The lowest rank that has the figure", ["figure", "stage"]
        )
        for key in last.keys:
            family = self._family(key, f"{key.help}, {key.extreme} among ranks", ["stage"])
            for stage, found in groups:
                if (figure := found.get(key.name)) is not None:
                    family.add_metric([stage, self._role], _scaled(key, figure.value))
                    whose.add_metric([key.name, stage, self._role], figure.rank)
            if family.samples:
                yield family
        yield whose
        yield from self._by_rank(last)
        yield from self._about(last)

    def _by_rank(self, last: Figures) -> Iterator[Any]:
        if last.ranks > self._ranks:
            return
        for key in last.keys:
            if key.name not in _ROW_KEYS:
                continue
            family = self._family(key, f"{key.help}, of each rank", ["rank"], "tenure_rank_")
            for rank, row in sorted(self._rows.items()):
                if key.name in row:
                    family.add_metric([str(rank), self._role], _scaled(key, row[key.name]))
            if family.samples:
                yield family

    def _about(self, last: Figures) -> Iterator[Any]:
        role = [self._role]
        for name, text, value in (
            ("tenure_peak_rank", "The rank whose memory is highest", last.peak_rank),
            ("tenure_alerts", "Rules that the last interval broke", len(last.alerts)),
            ("tenure_ranks", "Ranks that the figures are of", last.ranks),
            ("tenure_updated_timestamp_seconds", "When the last interval ended", last.time),
        ):
            family = self._gauge(name, text, [])
            family.add_metric(role, value)
            yield family
        lost = self._metrics.CounterMetricFamily(
            "tenure_dropped_intervals", "Intervals that sinks did not get", labels=["role"]
        )
        lost.add_metric(role, last.dropped)
        yield lost
        run = self._gauge("tenure_run_info", "The run that is told of", ["run", "rank"])
        run.add_metric([self._run_name, str(last.rank), *role], 1)
        yield run

    def _family(self, key: Key, text: str, labels: list[str], prefix: str = "tenure_") -> Any:
        if key.name in _COUNTERS:
            return self._metrics.CounterMetricFamily(
                prefix + key.name, text, labels=[*labels, "role"]
            )
        unit, _ = _UNITS.get(key.unit, ("", 1))
        name = key.name.removesuffix(key.unit) + unit if unit else key.name
        return self._gauge(prefix + name, text, labels)

    def _gauge(self, name: str, text: str, labels: list[str]) -> Any:
        return self._metrics.GaugeMetricFamily(name, text, labels=[*labels, "role"])


def _scaled(key: Key, value: int) -> float:
    return value / _UNITS.get(key.unit, ("", 1))[1]


class _Server(socketserver.ThreadingTCPServer):
    """Not ``http.server.HTTPServer``, which asks the DNS for its own name when it is made."""

    allow_reuse_address = True  # what an ended process has left half closed
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A scraper that hangs up is no news."""


class _Server6(_Server):
    address_family = socket.AF_INET6


def _bound(host: str, port: int) -> _Server:
    try:
        server = (_Server6 if ":" in host else _Server)(
            (host, port), socketserver.BaseRequestHandler
        )
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"the sink prometheus cannot listen at {host} port {port} ({why}): give it another, "
            "tenure.telemetry.sinks.Prometheus(port=…), or port=0 for any"
        ) from None
    _servers.add(server)
    return server


_servers: weakref.WeakSet[_Server] = weakref.WeakSet()


def _let_go() -> None:
    """In a forked child, which would otherwise keep the port when the parent has ended."""
    for server in list(_servers):
        server.socket.close()


os.register_at_fork(after_in_child=_let_go)
