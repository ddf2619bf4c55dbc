"""RTensor's calls over the store: what AReaL's own does, ours does, and what it got wrong is right.

The tests of `TestAsAreal` run twice, with AReaL's own module too where it can be imported: `make
test-integrations` installs it.
"""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import secrets
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

import areal_work
import tenure
from members import until
from tenure.integrations import areal
from tenure.integrations.areal import RTensor

SKIPPED = "areal cannot be imported: make test-integrations installs it"


@pytest.fixture(scope="module")
def job() -> Iterator[str]:
    """This process is trainer 0."""
    name = f"areal-{secrets.token_hex(4)}"
    tenure.store.leave()
    tenure.store.join(name, "trainer", 0)
    yield name
    tenure.store.leave()


@pytest.fixture(scope="module")
def other(job: str) -> Iterator[ProcessPoolExecutor]:
    """Another process of the job, trainer 1."""
    with ProcessPoolExecutor(
        1,
        multiprocessing.get_context("spawn"),
        initializer=areal_work.join,
        initargs=(job, "trainer", 1),
    ) as pool:
        yield pool


@pytest.fixture(autouse=True)
def nothing_left(job: str) -> Iterator[None]:  # noqa: ARG001  its member
    assert areal.storage_stats()["num_tensors"] == 0
    yield
    areal.clear_fetch_buffer()
    assert areal.storage_stats()["num_tensors"] == 0


@dataclass
class Peer:
    """A module with RTensor in it, and the address of this process there."""

    module: Any
    address: str

    def remotize(self, tree: Any) -> Any:
        return self.module.RTensor.remotize(tree, node_addr=self.address)

    def localize(self, tree: Any) -> Any:
        return self.module.RTensor.localize(tree)

    def clear(self, *ids: Any) -> None:
        asyncio.run(self.module.RTensor.clear_node(self.address, list(ids)))


@pytest.fixture(scope="module")
def real() -> Iterator[Peer]:
    """AReaL's own, with its HTTP data plane in a thread of this process."""
    module = pytest.importorskip("areal.infra.rpc.rtensor", reason=SKIPPED)
    from areal.infra.rpc.guard.app import GuardState, create_app
    from areal.infra.rpc.guard.data_blueprint import data_bp
    from werkzeug.serving import make_server

    app = create_app(GuardState())
    app.register_blueprint(data_bp)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Peer(module, f"127.0.0.1:{server.socket.getsockname()[1]}")
    server.shutdown()
    thread.join()


@pytest.fixture(params=["tenure", "areal"])
def peer(request: pytest.FixtureRequest, job: str) -> Peer:  # noqa: ARG001  ours is its member
    if request.param == "areal":
        found: Peer = request.getfixturevalue("real")
        return found
    return Peer(areal, "worker-0")


class TestAsAreal:
    def test_a_nest_comes_back(self, peer: Peer) -> None:
        tree = {
            "logp": torch.randn(3, 4).bfloat16(),
            "parts": [torch.arange(5), ("text", torch.tensor(2.5)), None],
            "n": 7,
        }
        sent = peer.remotize(tree)
        assert sent["logp"].data.is_meta
        assert (sent["logp"].shape, sent["logp"].dtype) == (torch.Size([3, 4]), torch.bfloat16)
        assert (sent["logp"].ndim, sent["logp"].device.type) == (2, "meta")
        assert (sent["parts"][1][0], sent["parts"][2], sent["n"]) == ("text", None, 7)
        found = peer.localize(sent)
        assert torch.equal(found["logp"], tree["logp"])
        assert torch.equal(found["parts"][0], torch.arange(5))
        assert found["parts"][1] == ("text", torch.tensor(2.5))
        assert found["parts"][2] is None
        peer.clear(*peer.module.flatten_shard_ids(sent))

    def test_what_is_no_tensor_is_left_alone(self, peer: Peer) -> None:
        assert peer.remotize(None) is None
        assert peer.remotize("text") == "text"
        assert peer.localize([1, {"a": 2}]) == [1, {"a": 2}]

    def test_padding_at_the_end_is_not_stored(self, peer: Peer) -> None:
        mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]])
        batch = {
            "attention_mask": mask,
            "input_ids": torch.arange(10).reshape(2, 5),
            "short": torch.ones(2, 2),
            "rewards": torch.tensor([0.5, 1.0]),
            "of_other_rows": torch.ones(3, 5),
        }
        sent = peer.remotize(batch)
        found = peer.localize(sent)
        assert {name: tuple(part.shape) for name, part in found.items()} == {
            "attention_mask": (2, 3),
            "input_ids": (2, 3),
            "short": (2, 2),
            "rewards": (2,),
            "of_other_rows": (3, 5),
        }
        assert found["input_ids"].tolist() == [[0, 1, 2], [5, 6, 7]]
        peer.clear(*peer.module.flatten_shard_ids(sent))

    def test_a_full_mask_trims_nothing(self, peer: Peer) -> None:
        sent = peer.remotize({"attention_mask": torch.ones(2, 5), "x": torch.ones(2, 9)})
        assert sent["x"].shape == (2, 9)
        peer.clear(*peer.module.flatten_shard_ids(sent))

    def test_shards_by_address(self, peer: Peer) -> None:
        here = peer.remotize([torch.ones(2), {"a": torch.zeros(2)}])
        there = peer.module.RTensor.remotize((torch.ones(3),), node_addr="elsewhere:1")
        shards = peer.module.RTensor.collect_shards([here, there])
        assert {address: len(ids) for address, ids in shards.items()} == {
            peer.address: 2,
            "elsewhere:1": 1,
        }
        flat = peer.module.flatten_shard_ids([here, there])
        assert flat == [*shards[peer.address], *shards["elsewhere:1"]]
        assert all(isinstance(shard, str) for shard in flat)
        peer.clear(*flat)

    def test_stats_follow_what_is_stored_and_cleared(self, peer: Peer) -> None:
        sent = peer.remotize([torch.ones(1000), torch.zeros(500)])
        before = peer.module.storage_stats()
        assert before["num_tensors"] == 2
        assert before["total_bytes"] >= 6000
        peer.clear(*peer.module.flatten_shard_ids(sent))
        assert peer.module.storage_stats() == {"num_tensors": 0, "total_bytes": 0}

    def test_what_was_fetched_is_kept_until_it_is_cleared(self, peer: Peer) -> None:
        sent = peer.remotize([torch.ones(4), torch.zeros(4)])
        ids = peer.module.flatten_shard_ids(sent)
        first = peer.localize(copy.deepcopy(sent))
        assert peer.module.fetch_buffer_stats() == {"num_entries": 2}
        again = peer.localize(copy.deepcopy(sent))
        assert again[0].data_ptr() == first[0].data_ptr()
        assert copy.deepcopy(sent[0]).to_local().data_ptr() == first[0].data_ptr()
        assert peer.module.clear_fetch_buffer([*ids[:1], "unknown"]) == 1
        assert peer.module.clear_fetch_buffer() == 1
        assert peer.module.fetch_buffer_stats() == {"num_entries": 0}
        peer.clear(*ids)

    def test_clearing_lets_go_of_what_was_fetched(self, peer: Peer) -> None:
        sent = peer.remotize([torch.ones(4)])
        peer.localize(copy.deepcopy(sent))
        peer.clear(*peer.module.flatten_shard_ids(sent))
        assert peer.module.fetch_buffer_stats() == {"num_entries": 0}

    def test_a_cleared_shard_cannot_be_fetched(self, peer: Peer) -> None:
        sent = peer.remotize({"a": torch.ones(4)})
        peer.clear(*peer.module.flatten_shard_ids(sent))
        with pytest.raises(RuntimeError):
            sent["a"].to_local()
        with pytest.raises(RuntimeError):
            peer.localize(sent)

    def test_a_shard_under_a_name_of_ones_own(self, peer: Peer) -> None:
        peer.module.store("mine", torch.ones(3))
        peer.module.store("mine", torch.zeros(3))
        assert peer.module.storage_stats()["num_tensors"] == 1
        assert peer.module.fetch("mine").tolist() == [0, 0, 0]
        assert (peer.module.remove("mine"), peer.module.remove("mine")) == (1, 0)
        with pytest.raises(KeyError, match="mine"):
            peer.module.fetch("mine")

    def test_tensors_that_need_gradients(self, peer: Peer) -> None:
        sent = peer.remotize([torch.ones(3, requires_grad=True) * 2])
        [found] = peer.localize(sent)
        assert not found.requires_grad
        peer.clear(*peer.module.flatten_shard_ids(sent))


class Named(NamedTuple):
    logp: Any
    n: int


class TestBeyondAreal:
    def test_a_view_is_stored_as_its_own_elements(self) -> None:
        sent = RTensor.remotize([torch.ones(1024, 1024)[:, :2]], node_addr="")
        assert areal.storage_stats()["total_bytes"] < 65_536
        assert RTensor.clear(sent) == 1

    def test_a_later_write_changes_nothing_that_is_stored(self) -> None:
        source = torch.zeros(4)
        sent = RTensor.remotize([source], node_addr="")
        source.fill_(1)
        assert RTensor.localize(sent)[0].tolist() == [0, 0, 0, 0]
        RTensor.clear(sent)

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.uint16])
    def test_every_dtype_comes_back(self, dtype: torch.dtype) -> None:
        tensor = torch.arange(4).to(dtype)
        sent = RTensor.remotize([tensor], node_addr="")
        [found] = RTensor.localize(sent)
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
        RTensor.clear(sent)

    def test_a_named_tuple_stays_one(self) -> None:
        sent = RTensor.remotize(Named(torch.ones(2), 3), node_addr="")
        assert isinstance(RTensor.localize(sent), Named)
        RTensor.clear(sent)

    def test_padding_at_the_front_is_stored(self) -> None:
        batch = {
            "attention_mask": torch.tensor([[0, 0, 1, 1, 0], [0, 1, 0, 1, 0]]),
            "input_ids": torch.arange(10).reshape(2, 5),
        }
        sent = RTensor.remotize(batch, node_addr="")
        assert RTensor.localize(sent)["input_ids"].tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
        RTensor.clear(sent)

    def test_a_process_that_leaves_frees_its_shards(self, job: str) -> None:
        sent = RTensor.remotize([torch.ones(1000)], node_addr="")
        tenure.store.leave()
        tenure.store.join(job, "trainer", 0)
        with pytest.raises(tenure.OwnerLost):
            RTensor.localize(sent)

    def test_a_rank_that_is_no_source_stores_nothing(self) -> None:
        sent = RTensor.remotize([torch.ones(1000)], node_addr="", sources=[4])
        assert areal.storage_stats()["num_tensors"] == 0
        with pytest.raises(tenure.TenureError, match="not one of the sources"):
            RTensor.localize(sent)
        assert RTensor.clear(sent) == 0

    def test_a_stale_shard_says_who_cleared_it(self) -> None:
        sent = RTensor.remotize([torch.ones(4)], node_addr="")
        RTensor.clear(sent)
        with pytest.raises(tenure.StaleHandle, match="freed"):
            RTensor.localize(sent)

    def test_a_scope_frees_what_it_owns(self) -> None:
        with tenure.store.scope("step") as step:
            sent = RTensor.remotize([torch.ones(4)], node_addr="", scope=step)
            RTensor.localize(copy.deepcopy(sent))
            assert areal.fetch_buffer_stats() == {"num_entries": 0}
        assert tenure.store.stats()["kept_bytes"] == 0
        with pytest.raises(tenure.StaleHandle):
            RTensor.localize(sent)

    def test_a_fetched_tensor_that_is_stored_again_is_the_same_shard(
        self, other: ProcessPoolExecutor
    ) -> None:
        sent = other.submit(areal_work.remotize, {"x": torch.ones(1 << 20)}).result()
        again = RTensor.remotize(RTensor.localize(copy.deepcopy(sent)), node_addr="")
        assert again["x"].shard.shard_id == sent["x"].shard.shard_id
        assert areal.storage_stats()["num_tensors"] == 0
        assert RTensor.clear(sent) == 1


class TestTwoProcesses:
    def test_a_consumer_fetches_and_clears(self, other: ProcessPoolExecutor) -> None:
        sent = RTensor.remotize({"a": torch.arange(3), "b": [torch.ones(1)]}, node_addr="worker-0")
        assert other.submit(areal_work.localize, sent).result() == {"a": [0, 1, 2], "b": [[1.0]]}
        assert other.submit(areal_work.stats).result()["num_entries"] == 2
        ids = areal.flatten_shard_ids(sent)
        assert other.submit(areal.clear_fetch_buffer, ids).result() == 2
        assert other.submit(RTensor.clear, sent).result() == 2
        assert areal.storage_stats()["num_tensors"] == 0

    @pytest.mark.parametrize("collectors", [None, 1])
    def test_what_is_cleared_elsewhere_is_not_kept(
        self, other: ProcessPoolExecutor, collectors: int | None
    ) -> None:
        sent = RTensor.remotize([torch.ones(9), torch.ones(4)], node_addr="", collectors=collectors)
        ids = areal.flatten_shard_ids(sent)
        other.submit(areal_work.localize, sent).result()
        assert other.submit(areal_work.stats).result()["kept_bytes"] == 52
        until(lambda: areal.storage_stats()["num_tensors"] == (0 if collectors else 2))
        for number, kept in (0, 16), (1, 0):
            asyncio.run(RTensor.clear_node("", [ids[number]]))
            until(lambda kept=kept: other.submit(areal_work.stats).result()["kept_bytes"] == kept)
        with pytest.raises(tenure.StaleHandle):
            other.submit(areal_work.localize, sent).result()

    def test_the_controller_clears_at_the_owner(self, other: ProcessPoolExecutor) -> None:
        sent = other.submit(areal_work.remotize, [torch.ones(1000)]).result()
        assert other.submit(areal_work.stats).result()["num_tensors"] == 1
        for address, ids in RTensor.collect_shards(sent).items():
            asyncio.run(RTensor.clear_node(address, ids))
        assert other.submit(areal_work.stats).result()["num_tensors"] == 0


class TestInAreal:
    """AReaL's own modules with the store below."""

    def test_ours_travels_through_its_rpc(self, real: Peer) -> None:  # noqa: ARG002  it is there
        import orjson
        from areal.infra.rpc.serialization import deserialize_value, serialize_value

        sent = RTensor.remotize({"a": torch.arange(3)}, node_addr="worker-0")
        received = deserialize_value(orjson.loads(orjson.dumps(serialize_value(sent))))
        assert received["a"].data.is_meta
        assert RTensor.localize(received)["a"].tolist() == [0, 1, 2]
        RTensor.clear(sent)

    def test_its_own_rtensor_stores_here(self, real: Peer) -> None:
        areal.enable()
        try:
            sent = real.remotize({"a": torch.arange(3), "b": [torch.ones(2).bfloat16()]})
            assert areal.storage_stats()["num_tensors"] == 2
            assert real.module.storage_stats()["num_tensors"] == 0
            found = real.localize(sent)
            assert found["a"].tolist() == [0, 1, 2]
            assert found["b"][0].dtype == torch.bfloat16
            for address, ids in real.module.RTensor.collect_shards(sent).items():
                asyncio.run(real.module.RTensor.clear_node(address, ids))
            assert real.module.fetch_buffer_stats() == {"num_entries": 0}
        finally:
            areal.disable()

    def test_without_areal_it_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "areal", None)
        monkeypatch.setitem(sys.modules, "areal.infra.rpc.rtensor", None)
        with pytest.raises(tenure.InputError, match="areal cannot be imported.*1.0.4"):
            areal.enable()
