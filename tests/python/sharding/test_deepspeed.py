"""Configurations of DeepSpeed as settings of `tenure.shard`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tenure
from tenure.sharding import from_deepspeed

# As HF's documentation has it for its Trainer.
COMMON = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": 1e5,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "train_micro_batch_size_per_gpu": "auto",
}


def test_a_common_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(COMMON))
    with pytest.warns(UserWarning, match="tenure.shard ignores") as told:
        found = from_deepspeed(path)
    assert found == {
        "param_dtype": torch.bfloat16,
        "offload": True,
        "keep_resident": 100_000,
        "prefetch_bytes": 2_000_000_000,
    }
    [warning] = told
    for key in ("sub_group_size", "stage3_max_reuse_distance", "gradient_clipping", "optimizer"):
        assert key in str(warning.message)
    assert "reduce_bucket_size" not in str(warning.message)  # "auto" asks for nothing
    assert warning.filename == __file__


def zero(**more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **more}}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (zero(), {}),
        (zero(stage3_prefetch_bucket_size=0), {"prefetch": 0}),
        (zero(param_persistence_threshold=7), {"keep_resident": 7}),
        (zero(max_live_parameters=10), {"prefetch_bytes": 40}),
        (zero(offload_optimizer={"device": "none"}), {}),
        ({**zero(), "communication_data_type": "fp32"}, {"reduce_dtype": torch.float32}),
        ({**zero(), "_comment": "ours"}, {}),
    ],
)
def test_what_counts(config: dict[str, Any], settings: dict[str, Any]) -> None:
    assert from_deepspeed(config) == settings


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "asks for stage None"),
        (zero() | {"communication_data_type": ["fp16"]}, "communication_data_type"),
        (zero() | {3: 4}, 'no setting "3"'),
        (zero() | {"bf16": {1: 2}}, 'no setting "1" in "bf16"'),
        ({"zero_optimization": {"stage": 2}}, "asks for stage 2"),
        ({**zero(), "fp61": {}}, 'no setting "fp61"; did you mean "fp16"'),
        (zero(overlap_com=True), 'no setting "overlap_com" in "zero_optimization"; did you mean'),
        (zero(offload_param={"device": "nvme"}), "nvme"),
        (zero(offload_param={"devices": "cpu"}), 'no setting "devices" in "offload_param"'),
        (zero(offload_param="cpu"), "offload_param"),
        (zero(max_live_parameters="many"), "number of elements"),
        ({**zero(), "communication_data_type": "int8"}, "one of fp32"),
        ({**zero(), "bf16": True}, "bf16"),
    ],
)
def test_what_is_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(tenure.InputError, match=text):
        from_deepspeed(config)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(tenure.InputError, match="No such file"):
        from_deepspeed(tmp_path / "none.json")
    twice = tmp_path / "twice.json"
    twice.write_text('{"zero_optimization": {"stage": 3, "stage": 2}}')
    with pytest.raises(tenure.InputError, match='"stage" more than once'):
        from_deepspeed(twice)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(tenure.InputError, match="is not JSON"):
        from_deepspeed(str(tmp_path / "bad.json"))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(tenure.InputError, match="no configuration"):
        from_deepspeed(tmp_path / "list.json")
