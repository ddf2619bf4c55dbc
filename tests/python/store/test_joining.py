"""Joining, leaving, and what a process is by default."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tenure
from forks import run_forked


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has not joined yet."""
    tenure.store.leave()
    monkeypatch.setattr(tenure.store.joining, "_left", None)
    yield
    tenure.store.leave()


def handle() -> tenure.store.Handle:
    return tenure.store.scope("call").put(torch.ones(2))


def test_torchruns_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "TORCHELASTIC_RUN_ID": "none",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "RANK": "3",
        "ROLE_NAME": "trainer",
    }.items():
        monkeypatch.setenv(name, value)
    assert handle().owner == ("trainer", 3)
    assert handle().job == "none@127.0.0.1:29500"


def test_an_empty_variable_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JOB", "ROLE", "RANK", "LISTEN", "SECRET", "SECRET_FILE", "TLS"):
        monkeypatch.setenv(f"TENURE_STORE_{name}", "")
    assert handle().owner == ("default", 0)
    assert handle().job == "default"


def test_without_any() -> None:
    assert handle().owner == ("default", 0)
    assert handle().job == "default"


def test_joining_twice() -> None:
    tenure.store.join("one", "trainer", 2)
    with pytest.raises(tenure.InputError, match="trainer 2 of the job 'one' already"):
        tenure.store.join("two")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"job": ""}, "job"),
        ({"job": "a\nb"}, "job"),
        ({"job": 3}, "str"),
        ({"role": "a:b"}, "role"),
        ({"rank": -1}, "rank"),
        ({"rank": "x"}, "rank"),
        ({"cap": 0}, "cap"),
        ({"cap": "lots"}, "bytes"),
        ({"when_full": "evict"}, "'refuse' or 'spill'"),
        ({"lease": 0}, "lease"),
        ({"timeout": float("nan")}, "timeout"),
        ({"listen": "nonsense"}, "not an address to listen on"),
        ({"listen": "::1:80"}, "not an address to listen on"),
        ({"listen": 80}, "an address to listen on"),
        ({"secret_file": "/nowhere"}, "/nowhere"),
        ({"when_full": "spill", "spill_folder": "/nowhere"}, "/nowhere"),
        ({"role": ""}, "role"),
        ({"role": 0}, "a role must be a str"),
        ({"advertise": 5}, "an address to advertise must be a str"),
        ({"secret_file": 5}, "the secret's file must be a str and is of type int"),
        ({"spill_folder": b"/tmp"}, "the folder to spill to must be a str and is of type bytes"),
        ({"tls": 5}, "three files"),
        ({"tls": ("a", "b")}, "three files"),
        ({"tls": ("a", 3, "c")}, "a file of tls must be a str"),
    ],
)
def test_arguments_that_mean_nothing(options: dict[str, Any], says: str) -> None:
    with pytest.raises(tenure.TenureError, match=says):
        tenure.store.join(**options)
    assert handle().get().tolist() == [1, 1]  # and it can be joined all the same


def test_a_secret_is_its_owners_alone(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef\n")
    secret.chmod(0o644)
    with pytest.raises(tenure.InputError, match="chmod 600"):
        tenure.store.join("job", secret_file=secret)
    secret.chmod(0o600)
    tenure.store.join("job", secret_file=secret)
    assert handle().get(wire="tcp").tolist() == [1, 1]


def test_a_short_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENURE_STORE_SECRET", "short")
    with pytest.raises(tenure.InputError, match="16"):
        tenure.store.join("job")


def test_without_a_secret_there_is_no_tcp() -> None:
    with pytest.raises(tenure.TenureError, match="secret"):
        handle().get(wire="tcp")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment has it open to other hosts."""
    monkeypatch.setenv("TENURE_STORE_SECRET", "0123456789abcdef")
    monkeypatch.setenv("TENURE_STORE_LISTEN", "0.0.0.0:0")
    monkeypatch.setenv("TENURE_STORE_ADVERTISE", "127.0.0.2")


def address() -> str:
    return handle()._handle.address[0]


@pytest.mark.usefixtures("elsewhere")
def test_the_environment_says_where_it_listens() -> None:
    assert address() == "127.0.0.2"  # also without a join()
    tenure.store.leave()
    tenure.store.join()
    assert address() == "127.0.0.2"


@pytest.mark.usefixtures("elsewhere")
def test_an_argument_comes_before_the_environment() -> None:
    tenure.store.join(listen="127.0.0.1:0", advertise="127.0.0.3")
    assert address() == "127.0.0.3"
    tenure.store.leave()
    tenure.store.join(listen=None)
    assert address() == ""


def test_the_first_use_listens_as_join_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENURE_STORE_SECRET", "0123456789abcdef")
    assert address() == "127.0.0.1"


def test_leaving_frees_and_a_handle_says_so() -> None:
    scope = tenure.store.scope("call")
    left = scope.put(torch.ones(2))
    tenure.store.leave()
    tenure.store.leave()
    with pytest.raises(tenure.InputError, match="has been left"):
        scope.put(torch.ones(2))
    assert scope.close().stored == 0
    tenure.store.join()
    with pytest.raises(tenure.OwnerLost, match="default 0"):
        left.get()


def test_one_that_has_left_does_not_join_again_by_itself() -> None:
    """As somebody else, that is: a thread that fetches late would be `default 0`."""
    tenure.store.join("one", "trainer", 2)
    sent = handle()
    tenure.store.leave()
    says = "has left the store, in which it was trainer 2 of the job 'one'"
    for use in (sent.get, handle, tenure.store.stats):
        with pytest.raises(tenure.InputError, match=says):
            use()
    tenure.store.join("one", "trainer", 2)
    assert handle().get().tolist() == [1, 1]


def test_a_forked_child_does_not_wait_for_the_parents_tables() -> None:
    """Whose lock a thread may have had when it forked, and nobody gives back here."""
    scope = tenure.store.scope("call")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            scope.account  # noqa: B018
        except tenure.TenureError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


WATCHED_CHILD = """
import os, sys
import torch, tenure
with tenure.store.scope("step", 1) as scope:
    mine = scope.put(torch.ones(2), collectors=[0])
    if os.fork() == 0:
        code = 1
        try:
            with tenure.Monitor(sinks=[], every=1, folder=sys.argv[1] + "/monitor") as monitor:
                for _ in range(3):
                    monitor.step()
            with tenure.watch(sys.argv[1] + "/watched", quiet=True):
                weight = torch.ones(2, requires_grad=True)
                optimizer = torch.optim.SGD([weight])
                for _ in range(3):
                    weight.sum().backward()
                    optimizer.step()
            code = 0
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.wait()[1]), mine.get().tolist())
"""


def test_a_forked_child_of_a_member_can_be_watched(tmp_path: Path) -> None:
    """The part that tells of the store is inherited, and has nothing to tell."""
    done = run_forked(["-c", WATCHED_CHILD, tmp_path])
    assert done.stdout == "0 [1.0, 1.0]\n", done.stderr


def test_a_forked_child_has_a_store_of_its_own() -> None:
    mine = handle()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if mine.get().tolist() == [1, 1] and handle().get().tolist() == [1, 1]:
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert mine.get().tolist() == [1, 1]
