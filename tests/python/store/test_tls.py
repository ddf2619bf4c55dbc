"""TCP with TLS: only processes whose certificate the job's authority signed."""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import tenure
from forks import run_forked
from members import Member, RemoteError
from store_work import raw, tensor_of


class Authority:
    """Signs certificates, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._run("req", "-x509", *self._new("authority"), "-days", "2")

    def files(self, name: str) -> list[str]:
        """A certificate, its key, and the authority's."""
        self._run(
            "req", *self._new(name), "-CA", "authority.pem", "-CAkey", "authority.key", "-x509"
        )
        return [str(self.folder / file) for file in (f"{name}.pem", f"{name}.key", "authority.pem")]

    def _new(self, name: str) -> list[str]:
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        return [*key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"]

    def _run(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made with the command `openssl`")
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def owner(authority: Authority) -> Iterator[Member]:
    """This process is reader 0 of its job."""
    job = f"tls-{secrets.token_hex(4)}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENURE_STORE_SECRET", secrets.token_hex(16))
        tenure.store.leave()
        tenure.store.join(job, "reader", 0, tls=authority.files("reader"))
        with Member(job, "owner", 0, tls=authority.files("owner")) as member:
            yield member
        tenure.store.leave()


@pytest.mark.parametrize("elements", [0, 3, 20_000, 3_000_000])
def test_it_comes_as_it_was(owner: Member, elements: int) -> None:
    handle = owner.call("put", "step", elements, {"shape": [elements]})
    for _ in range(3):
        assert raw(handle.get(wire="tcp")) == raw(tensor_of([elements]))


def test_many_at_once(owner: Member) -> None:
    handles = owner.call("put_many", "step", "many", 3000, 16)
    tensors = tenure.store.get_all(handles, wire="tcp")
    assert [tensor[0].item() for tensor in tensors] == list(range(3000))


def test_who_has_no_certificate_of_the_authority(owner: Member, tmp_path: Path) -> None:
    handle = owner.call("put", "step", 1, {"shape": [10]})
    other = Authority(tmp_path / "another").files("stranger")
    for options in ({"tls": other}, {}):
        with Member(handle.job, "stranger", 0, **options) as stranger:
            stranger.start("get", handle, wire="tcp", timeout=10)
            with pytest.raises(RemoteError, match="AccessRefused|OwnerLost"):
                stranger.result()
    assert raw(handle.get(wire="tcp")) == raw(tensor_of([10]))


def test_nothing_can_be_read_on_the_way(owner: Member, authority: Authority) -> None:
    """What passes through the wire's middle has no stretch of the tensor in it."""
    handle = owner.call("put", "step", 2, {"shape": [5000]})
    _, port = handle._handle.address
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as middle:
        threading.Thread(target=_relay, args=(middle, port, seen), daemon=True).start()
        there, here = (
            b"127.0.0.1" + n.to_bytes(2, "little") for n in (port, middle.getsockname()[1])
        )
        text = handle._handle.encode().replace(there, here)
        moved = tenure.store.Handle(type(handle._handle).decode(text))
        plain = raw(tensor_of([5000]))
        with Member(handle.job, "far", 0, tls=authority.files("far")) as far:
            assert far.call("get", moved, wire="tcp") == plain
    assert len(seen) > len(plain)
    assert not any(plain[at : at + 8] in seen for at in range(0, len(plain), 100))


def _relay(middle: socket.socket, port: int, seen: bytearray) -> None:
    def pass_on(source: socket.socket, target: socket.socket) -> None:
        while piece := source.recv(65_536):
            seen.extend(piece)
            target.sendall(piece)

    while True:
        try:
            near, _ = middle.accept()
        except OSError:
            return
        far = socket.create_connection(("127.0.0.1", port))
        for ends in ((near, far), (far, near)):
            threading.Thread(target=pass_on, args=ends, daemon=True).start()


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_files_that_cannot_be_used(authority: Authority, tmp_path: Path, broken: int) -> None:
    names = ["certificate", "key", "authority"]
    for name in ("nonsense", "nowhere"):
        files = authority.files("broken")
        files[broken] = str(tmp_path / name)
        (tmp_path / "nonsense").write_text("nonsense")
        program = (
            "import sys, tenure\n"
            "try:\n    tenure.store.join('tls-files', tls=sys.argv[1:])\n"
            "except tenure.InputError as error:\n    print(error)"
        )
        said = run_forked(["-c", program, *files]).stdout
        assert said.startswith(f"the {names[broken]} in {files[broken]} cannot be used: ")
