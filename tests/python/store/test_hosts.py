"""Two hosts, made of network namespaces: what one puts the other fetches over TCP."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from members import Member, RemoteError
from store_work import raw, tensor_of

TIMEOUT_S = 4.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    """Two namespaces with a cable between them."""

    def __init__(self, stack: ExitStack) -> None:
        mark = f"{os.getpid() % 10_000}{secrets.token_hex(1)}"
        self.names = [f"tenure{mark}a", f"tenure{mark}b"]
        self.addresses = ["10.213.7.1", "10.213.7.2"]
        self._ends = [f"t{mark}a", f"t{mark}b"]
        for name in self.names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        ip("link", "add", self._ends[0], "type", "veth", "peer", "name", self._ends[1])
        for name, end, address in zip(self.names, self._ends, self.addresses, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")

    def cut(self) -> None:
        ip("-n", self.names[0], "link", "set", self._ends[0], "down")

    def mend(self) -> None:
        ip("-n", self.names[0], "link", "set", self._ends[0], "up")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("hosts are made of network namespaces, which needs root and the command `ip`")
    with ExitStack() as stack:
        try:
            made = Hosts(stack)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode()}")
        yield made


@pytest.fixture
def members(hosts: Hosts) -> Iterator[list[Member]]:
    job = f"hosts-{secrets.token_hex(4)}"
    environment = {"TENURE_STORE_SECRET": secrets.token_hex(16)}
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Member(
                    job,
                    role,
                    0,
                    within=hosts.names[host],
                    environment=environment,
                    listen=f"{hosts.addresses[host]}:0",
                    timeout=TIMEOUT_S,
                )
            )
            for host, role in enumerate(["rollout", "trainer"])
        ]


@pytest.mark.parametrize("elements", [3, 1_000_000])
def test_it_comes_over_tcp(members: list[Member], elements: int) -> None:
    rollout, trainer = members
    handle = rollout.call("put", "step", 0, {"shape": [elements], "dtype": "bfloat16"})
    assert trainer.call("get", handle) == raw(tensor_of([elements], "bfloat16"))
    assert rollout.call("stats")["sent_bytes"] >= handle.bytes
    back = trainer.call("put", "step", 0, {"shape": [elements], "seed": 1})
    assert rollout.call("get", back) == raw(tensor_of([elements], seed=1))


def test_a_cut_link_is_said_in_time_and_mended(hosts: Hosts, members: list[Member]) -> None:
    rollout, trainer = members
    handle = rollout.call("put", "step", 0, {"shape": [1_000_000]})
    assert trainer.call("get", handle, more=True) == raw(tensor_of([1_000_000]))
    hosts.cut()
    try:
        begun = time.monotonic()
        with pytest.raises(RemoteError, match="(StoreTimeout|OwnerLost).*rollout 0"):
            trainer.call("get", handle)
        assert time.monotonic() - begun < TIMEOUT_S + 3
    finally:
        hosts.mend()
    deadline = time.monotonic() + 20
    while True:  # the other side may still be finding out
        with suppress(RemoteError):
            assert trainer.call("get", handle) == raw(tensor_of([1_000_000]))
            return
        assert time.monotonic() < deadline


def test_a_lost_owner_is_named(members: list[Member]) -> None:
    rollout, trainer = members
    handle = rollout.call("put", "step", 0, {"shape": [10]})
    trainer.call("get", handle, more=True)
    rollout.kill()
    with pytest.raises(RemoteError, match="OwnerLost.*rollout 0"):
        trainer.call("get", handle)


def test_another_secret_is_refused(hosts: Hosts, members: list[Member]) -> None:
    rollout, trainer = members
    handle = rollout.call("put", "step", 0, {"shape": [10]})
    environment = {"TENURE_STORE_SECRET": secrets.token_hex(16)}
    within = hosts.names[1]
    for other in (environment, {}):
        with Member(handle.job, "thief", 0, within=within, environment=other) as thief:
            thief.start("get", handle)
            with pytest.raises(RemoteError, match="AccessRefused.*secret"):
                thief.result()
    assert rollout.call("stats")["refused_secret"] >= 1
    assert trainer.call("get", handle) == raw(tensor_of([10]))
