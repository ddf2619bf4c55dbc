"""TRL's trainers with ``activation_offloading=True`` and Tenure enabled."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import tenure
from tenure.integrations import trl as integration

FOLDER = Path(__file__).parent
OFFLOADING = "trl.models.activation_offloading"
TESTED = r"Tested with 1\.8\.0 and 1\.16\.0"


def without(*packages: str) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


MISSING = " and ".join(without("trl", "peft"))
needs_trl = pytest.mark.skipif(
    bool(MISSING), reason=f"no {MISSING} here; `make setup` installs both where there is an index"
)


# --- SFT with LoRA, checkpointing, accumulation and bf16 ------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What sft_runs.py found, without offloading and then with."""
    out = tmp_path_factory.mktemp("sft") / "runs.json"
    ended = subprocess.run(
        [sys.executable, FOLDER / "sft_runs.py", out],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(out.read_text())


@needs_trl
def test_losses_and_adapters_are_those_without_offloading(runs: dict[str, Any]) -> None:
    plain, offloaded = runs["losses"]
    assert len(plain) == 3
    assert len(set(plain)) == 3, "nothing was trained"
    assert offloaded == plain
    assert len(runs["adapters_equal"]) == runs["adapters"] > 0


@needs_trl
def test_the_recipe_is_the_one_that_it_says_it_is(runs: dict[str, Any]) -> None:
    assert runs["precision"] == "bf16"
    assert runs["checkpointed"]


@needs_trl
def test_activations_moved_in_every_micro_step(runs: dict[str, Any]) -> None:
    assert runs["context"] == "Offload"
    assert runs["steps"] == 6, "three steps of two batches each"
    assert runs["moved_in"] == runs["moved_out"] > 0
    assert "moved to the host" in runs["printed"]


@needs_trl
def test_all_trainers_are_served_and_then_given_back(runs: dict[str, Any]) -> None:
    assert runs["makers"] == [[OFFLOADING], ["tenure.integrations.trl"], [OFFLOADING]]


@needs_trl
def test_the_example_moves_activations_and_says_how_many(runs: dict[str, Any]) -> None:
    assert re.search(r"moved to the host +[1-9]", runs["example"]), runs["example"]


# --- enable() and disable() -----------------------------------------------------------------------


def act_as_trl(monkeypatch: pytest.MonkeyPatch, version: str, members: dict[str, object]) -> Any:
    """A trl of that version whose module for offloading has these members."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("trl", "trl.models", OFFLOADING):
        module = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules["trl"], "__version__", version, raising=False)
    vars(sys.modules[OFFLOADING]).update(members)
    return sys.modules[OFFLOADING]


def taking_what_trl_takes(
    model: nn.Module,  # noqa: ARG001
    use_pin_memory: bool = True,  # noqa: ARG001
    use_streams: bool = True,  # noqa: ARG001
    min_offload_size: int = 1024,  # noqa: ARG001
    max_fwd_stash_size: int = 5,  # noqa: ARG001
    warn_if_no_head: bool = True,  # noqa: ARG001
) -> None:
    raise AssertionError("TRL's own offloading was asked for")


@pytest.fixture
def offloading(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for TRL's module, which loads all of transformers."""
    members = {"get_act_offloading_ctx_manager": taking_what_trl_takes}
    return act_as_trl(monkeypatch, "1.16.0", members)


@needs_trl
def test_the_stand_in_takes_what_trl_takes(runs: dict[str, Any]) -> None:
    assert runs["signature"] == list(inspect.signature(taking_what_trl_takes).parameters)


def test_enabling_twice_takes_the_later_options(offloading: Any) -> None:
    theirs = offloading.get_act_offloading_ctx_manager
    net = nn.Linear(4, 4)
    integration.enable(target="copy")
    integration.enable(target="disk:")
    with pytest.raises(tenure.InputError, match="disk:FOLDER"):
        offloading.get_act_offloading_ctx_manager(net)
    integration.enable(target="copy")
    assert isinstance(offloading.get_act_offloading_ctx_manager(model=net), tenure.Offload)
    integration.disable()
    integration.disable()
    assert offloading.get_act_offloading_ctx_manager is theirs


def test_a_module_that_imported_it_by_name_is_served_too(
    offloading: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = ModuleType("my_trainer")
    mine.get_act_offloading_ctx_manager = offloading.get_act_offloading_ctx_manager  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, mine.__name__, mine)
    integration.enable(target="copy")
    assert isinstance(mine.get_act_offloading_ctx_manager(nn.Linear(4, 4)), tenure.Offload)
    integration.disable()
    assert mine.get_act_offloading_ctx_manager is offloading.get_act_offloading_ctx_manager


def moved(offload: tenure.Offload, net: nn.Module) -> int:
    for _ in range(3):
        with offload:
            net(torch.ones(64, 64)).square().sum().backward()
    return offload.stats().moved_out_bytes


def test_what_callers_tell_trl_holds_unless_enable_says_otherwise(offloading: Any) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    make = "get_act_offloading_ctx_manager"
    integration.enable(target="copy")
    large = getattr(offloading, make)(net, use_streams=False, min_offload_size=1 << 30)
    assert moved(large, net) == 0
    assert moved(getattr(offloading, make)(net, min_offload_size=0), net) > 0
    with pytest.raises(TypeError, match="no_such"):
        getattr(offloading, make)(net, no_such=1)
    integration.enable(target="copy", min_bytes=1)
    assert moved(getattr(offloading, make)(net, min_offload_size=1 << 30), net) > 0


def test_hooks_that_trl_left_on_a_head_do_no_harm(offloading: Any) -> None:
    """A trainer made before leaves them: what the head saves then stays on the device."""

    def gradients(*, hooked: bool, offloaded: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 256))
        if hooked:
            none = saved_tensors_hooks(lambda x: x, lambda x: x)  # TRL's NoOpManager
            net[3].register_forward_pre_hook(lambda *_: none.__enter__())
            net[3].register_forward_hook(lambda *_: none.__exit__(), always_call=True)
        offload = offloading.get_act_offloading_ctx_manager(net) if offloaded else None
        for _ in range(4):
            net.zero_grad()
            if offload is None:
                net(torch.ones(64, 64)).square().sum().backward()
            else:
                with offload:
                    net(torch.ones(64, 64)).square().sum().backward()
        assert offload is None or offload.stats().moved_out_bytes > 0
        return [parameter.grad for parameter in net.parameters()]  # type: ignore[misc]

    integration.enable(target="copy", min_bytes=1)
    plain = gradients(hooked=False, offloaded=False)
    for hooked in (False, True):
        for ours, theirs in zip(gradients(hooked=hooked, offloaded=True), plain, strict=True):
            assert torch.equal(ours, theirs)


# --- what is refused ------------------------------------------------------------------------------


def test_without_trl_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(tenure.InputError, match=rf"^trl cannot be imported .*{TESTED}"):
        integration.enable()


@pytest.mark.parametrize(
    ("members", "complaint"),
    [
        ({}, "has no attribute 'get_act_offloading_ctx_manager'"),
        ({"get_act_offloading_ctx_manager": lambda: None}, "takes no model"),
    ],
)
def test_another_trl_is_refused_with_its_version(
    monkeypatch: pytest.MonkeyPatch, members: dict[str, object], complaint: str
) -> None:
    act_as_trl(monkeypatch, "99.0", members)
    with pytest.raises(tenure.InputError, match=rf"^trl 99\.0 .*{complaint}.* {TESTED}"):
        integration.enable()


def test_a_trl_without_that_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    act_as_trl(monkeypatch, "0.1", {})
    monkeypatch.delitem(sys.modules, OFFLOADING)
    with pytest.raises(tenure.InputError, match=rf"^trl 0\.1 .*No module named.* {TESTED}"):
        integration.enable()


def test_an_option_that_offload_does_not_have_is_refused() -> None:
    with pytest.raises(
        tenure.InputError, match="Offload has no option size: it has budget, target"
    ):
        integration.enable(size=1)  # type: ignore[call-arg]
