"""`tenure top --web`: the same table as a page that follows the run. Imports no torch."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from tenure.errors import InputError
from tenure.inspect.verdicts import shown_path
from tenure.telemetry.rings import Ring, Rings, read
from tenure.telemetry.standing import (
    COLUMNS,
    SORTS,
    headline,
    in_order,
    memory_of,
    standing,
    summary,
)
from tenure.telemetry.top import Request, left_out, more, waiting

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request as Asked
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise InputError(
        f"the page needs {error.name}, which is not installed: pip install 'tenure[web]'"
    ) from None

__all__ = ["application", "serve"]

MOST_ROWS = 200
POINTS = 120  # of a curve
_PARTS = Path(__file__).parent / "page"


def serve(request: Request, host: str, port: int) -> int:
    """Serves the page until Ctrl-C; returns the exit status."""
    view = View(request)
    view.now(request.sort)  # a folder that is not there is said here, not on the page
    listening = _listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    print(f"tenure top: http://{shown}:{listening.getsockname()[1]} (Ctrl-C ends)", flush=True)
    if not _is_loopback(host):
        print(f"tenure top: whoever reaches {host} can read it: there is no password", flush=True)
    settings = uvicorn.Config(
        application(view, host),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    try:
        uvicorn.Server(settings).run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()
    return 0


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(f"there is no host '{host}': {error.strerror}") from None
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        why = error.strerror.lower() if error.strerror else str(error)
        raise InputError(
            f"cannot listen on port {port} of {host}: {why}: give another with --port"
        ) from None
    return listening


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class View:
    """What the page shows. From any thread; looks at the files at most once an interval."""

    def __init__(self, request: Request) -> None:
        """Looks at nothing yet."""
        self.request = request
        self._rings = Rings.of_run(request.folder)
        self._found: list[Ring] = []
        self._looked = float("-inf")
        self._curves: dict[Path, tuple[int, list[tuple[int, int]]]] = {}
        self._lock = threading.Lock()

    def now(self, sort: str) -> dict[str, Any]:
        """All that the page needs, as JSON has it; raises InputError if the folder is gone."""
        with self._lock:
            if time.monotonic() - self._looked >= self.request.every:
                self._found = self._rings.look(last=2)
                self._looked = time.monotonic()
            return self._shown(sort)

    def _shown(self, sort: str) -> dict[str, Any]:
        ranks = [standing(ring) for ring in self._found]
        out: dict[str, Any] = {
            "folder": shown_path(self.request.folder),
            "every": self.request.every,
            "sort": sort,
            "left_out": left_out(self._rings.broken.values()) if self._rings.broken else "",
        }
        if not ranks:
            return out | {"headline": waiting(self.request.folder), "ranks": []}
        paths = {ring.identity.rank: ring for ring in self._found}
        shown = in_order(ranks, sort, min(MOST_ROWS, self.request.rows or MOST_ROWS))
        columns = [column for column in COLUMNS if any(map(column.text, shown))]
        curves = {one.rank: self._curve(paths[one.rank]) for one in shown}
        self._curves = {paths[one.rank].path: self._curves[paths[one.rank].path] for one in shown}
        worst = min(ranks, key=lambda one: one.worry)
        return out | {
            "headline": headline(ranks),
            "level": worst.level,
            "summary": summary(ranks),
            "more": more(len(shown), len(ranks), sort) if len(ranks) > len(shown) else "",
            "columns": [{"title": column.title, "number": column.number} for column in columns],
            "ranks": [
                {
                    "rank": one.rank,
                    "level": one.level,
                    "cells": [column.text(one) for column in columns],
                    "bound": one.bound,
                    "curve": curves[one.rank],
                }
                for one in shown
            ],
        }

    def _curve(self, ring: Ring) -> list[tuple[int, int]]:
        """Memory by step, thinned out; the ring is read again only where it has grown."""
        known = self._curves.get(ring.path)
        if known is None or known[0] != ring.appended:
            try:
                rows = read(ring.path).rows
            except InputError:  # it went since we looked
                rows = ring.rows
            points = [(row["step"], memory_of(row)) for row in rows]
            whole = [(step, memory) for step, memory in points if memory is not None]
            known = self._curves[ring.path] = (ring.appended, _thinned(whole))
        return known[1]


def _thinned(points: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The highest point of each stretch: a peak stays one. The last point stays, too."""
    stretch = -(-len(points) // POINTS)
    if stretch <= 1:
        return points
    parts = [points[at : at + stretch] for at in range(0, len(points), stretch)]
    highest = [max(part, key=lambda point: point[1]) for part in parts]
    return highest if highest[-1] == points[-1] else [*highest, points[-1]]


def application(view: View, host: str = "127.0.0.1") -> Starlette:
    """The page and its figures. Names other than the host's are refused on loopback.

    A page elsewhere could otherwise read this one through a name that it points here.
    """

    def page(_: Asked) -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
            "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'"
        )
        text = (_PARTS / "top.html").read_text()
        for mark, part in (("/*style*/", "top.css"), ("/*script*/", "top.js")):
            text = text.replace(mark, (_PARTS / part).read_text())
        text = text.replace('nonce=""', f'nonce="{nonce}"')
        return HTMLResponse(text, headers={"Content-Security-Policy": policy} | _NOT_KEPT)

    def ranks(asked: Asked) -> Response:
        sort = asked.query_params.get("sort", view.request.sort)
        if sort not in SORTS:
            return JSONResponse({"error": "there is no such order"}, 400)
        try:
            return JSONResponse(view.now(sort), headers=_NOT_KEPT)
        except InputError as error:
            return JSONResponse({"error": str(error)}, 503, headers=_NOT_KEPT)

    names = ["127.0.0.1", "localhost", "[::1]", "[", host] if _is_loopback(host) else ["*"]
    return Starlette(
        routes=[Route("/", page), Route("/ranks.json", ranks)],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=names)],
    )


_NOT_KEPT = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
