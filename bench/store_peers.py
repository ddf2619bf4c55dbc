"""The sides of the peers in bench/store.py: the packages themselves, over their own wires."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from store_child import Side

LOCAL = "127.0.0.1"


class RTensor(Side):
    """AReaL's: remotize() in a process with its HTTP data plane, localize() in another."""

    def begin(self, role: str, number: int, setting: Any) -> None:  # noqa: ARG002  a side's signature
        from areal.infra.rpc import rtensor

        self._rtensor = rtensor
        self._kept: dict[str, list[Any]] = {}
        self._address = ""
        if role == "producer":
            from areal.infra.rpc.guard.app import GuardState, create_app
            from areal.infra.rpc.guard.data_blueprint import data_bp
            from werkzeug.serving import make_server

            logging.getLogger("werkzeug").setLevel(logging.WARNING)
            app = create_app(GuardState())
            app.register_blueprint(data_bp)
            server = make_server(LOCAL, 0, app, threaded=True)
            self._address = f"{LOCAL}:{server.socket.getsockname()[1]}"
            threading.Thread(target=server.serve_forever, daemon=True).start()

    def about(self) -> dict[str, Any]:
        return {"version": f"areal {version('areal')}"}

    def store(self, key: str, tensors: list[torch.Tensor]) -> Any:
        self._kept[key] = self._rtensor.RTensor.remotize(tensors, node_addr=self._address)
        found = self._kept[key]
        return [(vars(item.shard), item.data.shape, item.data.dtype) for item in found]

    def release(self, key: str) -> None:
        ids = self._rtensor.flatten_shard_ids(self._kept.pop(key))
        asyncio.run(self._rtensor.RTensor.clear_node(self._address, ids))

    def prepare(self, token: Any) -> Any:
        self._rtensor.clear_fetch_buffer()
        made, shard = self._rtensor.RTensor, self._rtensor.TensorShardInfo
        return [
            made(shard(**told), torch.empty(shape, dtype=dtype, device="meta"))
            for told, shape, dtype in token
        ]

    def fetch(self, ticket: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = self._rtensor.RTensor.localize(ticket)
        self._rtensor.clear_fetch_buffer()
        return found


class RayHead(Side):
    """Starts Ray, and the actors that are the sides."""

    def begin(self, role: str, number: int, setting: Any) -> None:  # noqa: ARG002  a side's signature
        import ray

        ray.init(
            num_cpus=8,
            object_store_memory=4 << 30,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        self._actors: list[Any] = []

    def about(self) -> dict[str, Any]:
        return {"version": f"ray {version('ray')}"}

    def end(self) -> None:
        import ray

        ray.shutdown()

    def spawn(self, address: str, role: str, number: int) -> None:
        import ray

        bench = str(Path(__file__).parent)

        class Actor:  # in here, so that Ray sends it whole: workers do not find this folder
            def obey(self) -> None:
                import sys

                sys.path.append(bench)
                import store_child

                store_child.obey(address, "Ray", role, number, None)

            def give(self, key: str) -> list[Any]:
                import store_peers

                return store_peers.REFERENCES[key]

        name = "producer" if role == "producer" else None
        # One thread obeys the bench, the other gives references away.
        actor = ray.remote(Actor).options(name=name, max_concurrency=2, num_cpus=1).remote()
        actor.obey.remote()
        self._actors.append(actor)


REFERENCES: dict[str, list[Any]] = {}  # of the actor that this process is


class Ray(Side):
    """ray.put() in one actor, ray.get() in another."""

    def begin(self, role: str, number: int, setting: Any) -> None:  # noqa: ARG002  a side's signature
        import ray

        self._ray = ray
        self._producer: Any = None

    def about(self) -> dict[str, Any]:
        return {"version": f"ray {version('ray')}"}

    def store(self, key: str, tensors: list[torch.Tensor]) -> Any:
        REFERENCES[key] = [self._ray.put(tensor) for tensor in tensors]
        return key

    def release(self, key: str) -> None:
        del REFERENCES[key]

    def prepare(self, token: Any) -> Any:
        self._producer = self._producer or self._ray.get_actor("producer")
        return self._ray.get(self._producer.give.remote(token))

    def fetch(self, ticket: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = self._ray.get(ticket)
        return found


class Mooncake(Side):
    """Its store on TCP, with a master that the producer starts."""

    def begin(self, role: str, number: int, setting: Any) -> None:  # noqa: ARG002  a side's signature
        from mooncake import store

        self._kept: dict[str, list[str]] = {}
        self._setting = setting if role == "consumer" else {"master": self._start_master()}
        self._store = store.MooncakeDistributedStore()
        segment = (2 << 30) if role == "producer" else 0
        code = self._store.setup(
            LOCAL, "P2PHANDSHAKE", segment, 1 << 30, "tcp", "", self._setting["master"]
        )
        if code:
            raise RuntimeError(f"Mooncake's setup gave {code}")

    def _start_master(self) -> str:
        ports = []
        for _ in range(2):
            with socket.create_server((LOCAL, 0)) as free:
                ports.append(free.getsockname()[1])
        import mooncake

        program = Path(mooncake.__path__[0]) / "mooncake_master"
        self._master = subprocess.Popen(
            [
                program,
                f"--rpc_address={LOCAL}",
                f"--rpc_port={ports[0]}",
                f"--metrics_host={LOCAL}",
                f"--metrics_port={ports[1]}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection((LOCAL, ports[0])):
                return f"{LOCAL}:{ports[0]}"
        raise RuntimeError("mooncake_master does not answer")

    def about(self) -> dict[str, Any]:
        name = "mooncake-transfer-engine-non-cuda"
        return {"version": f"mooncake {version(name)}", "setting": self._setting}

    def end(self) -> None:
        self._store.close()
        if hasattr(self, "_master"):
            self._master.terminate()
            self._master.wait()

    def store(self, key: str, tensors: list[torch.Tensor]) -> Any:
        names = self._kept[key] = [f"{key}/{number}" for number in range(len(tensors))]
        if len(tensors) == 1:
            codes = [self._store.put_tensor(names[0], tensors[0])]
        else:
            codes = self._store.batch_put_tensor(names, tensors)
        if any(codes):
            raise RuntimeError(f"Mooncake's put gave {next(code for code in codes if code)}")
        return names

    def release(self, key: str) -> None:
        self._store.batch_remove(self._kept.pop(key), True)  # what is leased, too

    def fetch(self, ticket: Any) -> list[torch.Tensor]:
        if len(ticket) == 1:
            found = [self._store.get_tensor(ticket[0])]
        else:
            found = self._store.batch_get_tensor(ticket)
        if missing := sum(tensor is None for tensor in found):
            raise RuntimeError(f"Mooncake gave None for {missing} of {len(found)} tensors")
        return found


class Torchstore(Side):
    """Its volume is a process of its own: this one puts there and gets from there."""

    def begin(self, role: str, number: int, setting: Any) -> None:  # noqa: ARG002  a side's signature
        import torchstore

        self._store = torchstore
        self._loop = asyncio.new_event_loop()
        self._kept: dict[str, list[str]] = {}
        self._loop.run_until_complete(torchstore.initialize())

    def about(self) -> dict[str, Any]:
        return {"version": f"torchstore {version('torchstore')}"}

    def store(self, key: str, tensors: list[torch.Tensor]) -> Any:
        names = self._kept[key] = [f"{key}/{number}" for number in range(len(tensors))]
        pairs = zip(names, tensors, strict=True)
        self._wait([self._store.put(name, tensor) for name, tensor in pairs])
        return names

    def release(self, key: str) -> None:
        self._wait([self._store.delete(name) for name in self._kept.pop(key)])

    def fetch(self, ticket: Any) -> list[torch.Tensor]:
        return self._wait([self._store.get(name) for name in ticket])

    def _wait(self, calls: list[Any]) -> list[Any]:
        async def all_of_them() -> list[Any]:
            return list(await asyncio.gather(*calls))

        return self._loop.run_until_complete(all_of_them())


SIDES: dict[str, type[Side]] = {
    "RTensor": RTensor,
    "RayHead": RayHead,
    "Ray": Ray,
    "Mooncake": Mooncake,
    "Torchstore": Torchstore,
}
