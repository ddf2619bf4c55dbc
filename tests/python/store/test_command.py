"""`tenure store` and the keeper."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tenure
from forks import Forked, run_forked
from members import Member, RemoteError, until
from store_work import raw, tensor_of
from tenure import _C
from tenure.store import Handle, listing, scopes
from tenure.store import keeper as keeping

TENURE = Path(sys.executable).with_name("tenure")


@pytest.fixture
def job() -> Iterator[str]:
    name = f"command-{secrets.token_hex(4)}"
    tenure.store.leave()
    tenure.store.join(name, "reader", 0)
    yield name
    tenure.store.leave()


def run(*arguments: str, expect: int = 0) -> str:
    done = run_forked(["-m", "tenure", "store", *arguments])
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout


@contextmanager
def keeper(job: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    started = Forked(
        ["-m", "tenure", "store", "serve", "--job", job, *options],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    try:
        assert started.stdout.readline().startswith(f"keeping for the job '{job}'")
        yield started
    finally:
        if started.poll() is None:
            started.send_signal(signal.SIGINT)
        started.wait(timeout=20)
        started.stdout.close()


def test_the_list_names_line_owner_and_who_is_waited_for(job: str) -> None:
    with Member(job, "trainer", 3) as trainer:
        trainer.call("put", "step", 168, {"shape": [1000, 1000]}, collectors=["reader:0", 7])
        trainer.call("put", "step", 169, {"shape": [3], "dtype": "bfloat16"}, call="logp")
        shown = run("ls", "--job", job)
        assert shown.splitlines()[0] == "2 objects, 3.8 MiB, in 2 processes"
        row = r"3\.8 MiB +trainer 3 +step 168 +\S*store_work\.py:\d+ +float32 \[1000, 1000\] +memfd"
        assert re.search(row + " +reader 0, rank 7", shown)
        assert re.search(r"6 B .* step 169 \(logp\) .* slab +the scope's end", shown)
        told = json.loads(run("ls", "--job", job, "--scope", "step 169", "--json"))
        assert [row["bytes"] for row in told["objects"]] == [6]
        stats = run("stats", "--job", job)
        assert re.search(r"trainer 3 +2 +3\.8 MiB ", stats)


@pytest.mark.parametrize("command", ["ls", "stats"])
def test_a_job_that_can_be_none(command: str) -> None:
    done = run_forked(["-m", "tenure", "store", command, "--job", ""])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tenure: the job is empty: give it a name\n"


def test_one_that_ends_while_it_is_listed(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its first answer and its list."""
    with Member(job, "trainer", 0) as gone, Member(job, "trainer", 1) as there:
        for trainer in gone, there:
            trainer.call("put", "step", 0, {"shape": [4]})
        asked = listing._objects

        def objects(asking: _C.Store, server: listing.Server) -> Iterator[dict[str, Any]]:
            if server.name == "trainer 0":
                gone.kill()
            return asked(asking, server)

        monkeypatch.setattr(listing, "_objects", objects)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            assert listing.show_objects(job, None, 50, json=True) == 0
        assert [row["owner"] for row in json.loads(said.getvalue())["objects"]] == ["trainer 1"]


def test_nobody_there() -> None:
    assert run("ls", "--job", "nobody-has-this-one") == (
        "no process of the job 'nobody-has-this-one' on this host has a store: one has once it "
        "puts or fetches\n"
    )


def test_a_killed_process_is_not_in_the_way(job: str) -> None:
    with Member(job, "trainer", 0) as trainer:
        trainer.call("put", "step", 0, {"shape": [4]})
        trainer.kill()
    assert run("ls", "--job", job).splitlines()[0] == "0 objects, 0 B, in 1 processes"


def test_those_that_do_not_answer_are_waited_for_together(job: str) -> None:
    with Member(job, "trainer", 0) as first, Member(job, "trainer", 1) as second:
        for trainer in first, second:
            trainer.call("put", "step", 0, {"shape": [4]})
        begun = time.monotonic()
        with first.stopped(), second.stopped():
            done = run_forked(["-m", "tenure", "store", "ls", "--job", job])
        assert time.monotonic() - begun < 9  # five seconds for both
        assert done.returncode == 1
        assert done.stderr.count("does not answer") == 2
        assert "0 objects, 0 B, in 1 processes" in done.stdout  # this one


def test_a_keeper_outlives_who_put(job: str) -> None:
    with keeper(job, "--cap", "64MiB") as kept:
        with Member(job, "producer", 0) as producer:
            handles = [
                producer.call("put", "step", 0, {"shape": [n]}, collectors=["reader"], keeper=True)
                for n in (4, 500_000)
            ]
            until(lambda: producer.call("stats")["objects"] == 0)
            producer.kill()
        for n, handle in zip((4, 500_000), handles, strict=True):
            assert handle.owner == ("keeper", 0)
            assert raw(handle.get()) == raw(tensor_of([n]))
        again = run_forked(["-m", "tenure", "store", "serve", "--job", job])
        assert again.returncode == 2
        with socket.socket(socket.AF_UNIX) as nobody:  # comes, and says nothing
            nobody.connect(str(Path(_C.store_folder(job)) / "keeper.control"))
        more = tenure.store.scope("step", 1).put(tensor_of([9]), keeper=True)
        assert more.owner == ("keeper", 0)
        assert again.stderr == f"tenure: the job '{job}' has a keeper on this host already\n"
        kept.send_signal(signal.SIGTERM)
        assert kept.wait(timeout=20) == 143


def test_a_visitor_does_not_keep_others_from_the_keeper(job: str) -> None:
    with (
        keeper(job),
        socket.socket(socket.AF_UNIX) as silent,
        socket.socket(socket.AF_UNIX) as deep,
    ):
        control = str(Path(_C.store_folder(job)) / "keeper.control")
        silent.connect(control)
        deep.connect(control)
        deep.sendall(b"[" * 200_000 + b"\n")
        assert "recursion" in json.loads(deep.makefile().readline())["error"]
        with tenure.store.scope("step") as step:
            assert step.put(tensor_of([9]), keeper=True).owner == ("keeper", 0)


def test_a_keeper_without_descriptors_goes_on_when_it_has_some(job: str) -> None:
    with keeper(job) as kept:
        limits = resource.prlimit(kept.pid, resource.RLIMIT_NOFILE)
        control = str(Path(_C.store_folder(job)) / "keeper.control")
        resource.prlimit(kept.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        with socket.socket(socket.AF_UNIX) as last, socket.socket(socket.AF_UNIX) as refused:
            last.connect(control)  # whose descriptor was taken when the keeper began to wait
            refused.connect(control)
            last.sendall(b"nonsense\n")
            assert "error" in json.loads(last.makefile().readline())
        resource.prlimit(kept.pid, resource.RLIMIT_NOFILE, limits)
        with tenure.store.scope("step") as step:
            assert step.put(tensor_of([9]), keeper=True).owner == ("keeper", 0)


def kept_objects(job: str) -> int:
    told = json.loads(run("stats", "--job", job, "--json"))
    return sum(
        one["objects"]["objects"] for one in told["processes"] if one["owner"]["role"] == "keeper"
    )


def test_a_keeper_frees_what_its_visitor_did_not_wait_for(job: str) -> None:
    with keeper(job), tenure.store.scope("step") as step:
        handle = step.put(tensor_of([9]), collectors=["keeper"])
        asked = {"handle": handle.text(), "listed": None, "count": None, "site": ""}
        with socket.socket(socket.AF_UNIX) as impatient:
            impatient.connect(str(Path(_C.store_folder(job)) / "keeper.control"))
            impatient.shutdown(socket.SHUT_RD)
            impatient.sendall(json.dumps(asked).encode() + b"\n")
        until(lambda: tenure.store.stats()["objects"] == 0)  # it has taken it
        until(lambda: kept_objects(job) == 0)


def test_a_keeper_keeps_nothing_of_a_scope_that_closed(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_and_close(*arguments: Any) -> Handle:
        handle = keeping.give(*arguments)
        step.close()
        return handle

    with keeper(job):
        step = tenure.store.scope("step")
        monkeypatch.setattr(scopes, "give", give_and_close)
        for _ in range(2):  # it closes meanwhile, and was closed before
            late = step.put(tensor_of([9]), keeper=True)
            assert not late.stored
            assert "was closed by reader 0" in late.why
        assert kept_objects(job) == 0


def test_without_a_keeper(job: str) -> None:
    with Member(job, "producer", 0) as producer:
        with pytest.raises(RemoteError, match="OwnerLost.*tenure store serve"):
            producer.call("put", "step", 0, {"shape": [4]}, keeper=True)
        assert producer.call("stats")["objects"] == 0


def test_a_keeper_without_room(job: str) -> None:
    with keeper(job, "--cap", "1MB"), Member(job, "producer", 0) as producer:
        with pytest.raises(RemoteError, match="keeper could not take .* room"):
            producer.call("put", "step", 0, {"shape": [500_000]}, keeper=True)
        assert producer.call("stats")["objects"] == 0


def test_an_option_of_a_keeper_comes_before_the_environment(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENURE_STORE_SECRET", "0123456789abcdef")
    monkeypatch.setenv("TENURE_STORE_LISTEN", "nonsense")
    with keeper(job, "--listen", "127.0.0.1:0"):
        pass
    said = run_forked(["-m", "tenure", "store", "serve", "--job", job])
    assert (said.returncode, "nonsense" in said.stderr) == (2, True)


def test_bad_options_of_a_keeper() -> None:
    arguments = [TENURE, "store", "serve", "--job", f"bad-{os.getpid()}", "--cap", "lots"]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tenure: 'lots' is no number of bytes: write 12GiB, 500MB or 1048576\n"
