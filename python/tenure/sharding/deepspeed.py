"""What a configuration of DeepSpeed's ZeRO-3 asks for, as settings of `tenure.shard`."""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tenure.errors import InputError

__all__ = ["from_deepspeed"]

_TYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "bfp16": torch.bfloat16,
}

# What Tenure does not do as asked, in sentences that follow "it ignores KEY, for".
_LOOP = "that is the training loop's"
_ALWAYS = "it is so, or not needed, in any case"
_UNITS = "a unit is gathered, and its gradients added up, as one"
_OTHER = "it has no such thing"

_IGNORED = {
    "": {
        _LOOP: "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
        "managed_gradient_accumulation gradient_clipping optimizer scheduler steps_per_print "
        "wall_clock_breakdown memory_breakdown dump_state dataloader_drop_last tensorboard wandb "
        "csv_monitor comet flops_profiler comms_logger activation_checkpointing checkpoint seed "
        "disable_python_gc",
        _ALWAYS: "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_allgather "
        "prescale_gradients gradient_predivide_factor",
        _OTHER: "amp torch_autocast sparse_gradients sparse_attention autotuning elasticity aio "
        "compression_training curriculum_learning data_efficiency progressive_layer_drop "
        "eigenvalue quantize_training nebula pipeline hybrid_engine compile tensor_parallel "
        "sequence_parallel_size graph_harvesting seq_parallel_communication_data_type "
        "use_data_before_expert_parallelism expert_parallel gradient_allreduce_op",
    },
    "zero_optimization": {
        _ALWAYS: "contiguous_gradients reduce_scatter overlap_comm allgather_partitions "
        "round_robin_gradients ignore_unused_parameters legacy_stage1 elastic_checkpoint "
        "load_from_fp32_weights memory_efficient_linear parameter_alignment compute_grad_norm "
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "cpu_offload_use_pin_memory pipeline_loading_checkpoint log_trace_cache_warnings "
        "enable_sanity_checks override_module_apply",
        _UNITS: "reduce_bucket_size allgather_bucket_size sub_group_size "
        "use_multi_rank_bucket_allreduce stage3_max_reuse_distance "
        "stage3_model_persistence_threshold stage3_module_granularity_threshold leaf_module "
        "stage3_allgather_sequential stage3_use_all_reduce_for_fetch_params",
        _OTHER: "zero_quantized_weights zero_quantized_nontrainable_weights zenflow "
        "zero_quantized_gradients zeropp_loco_param save_muon_momentum_buffer_in_memory",
        "a DeviceMesh of two dimensions says which ranks are replicas": "zero_hpz_partition_size "
        "mics_shard_size mics_hierarchical_params_gather",
    },
    "data_types": {
        _LOOP: "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    },
}
_HALF = (
    "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis "
    "consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads immediate_grad_update "
    "check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"
)
_OFFLOAD = (
    "nvme_path buffer_count buffer_size max_in_cpu pin_memory pipeline_read pipeline_write "
    "pipeline fast_init ratio super_offload cpuadam_cores_perc"
)


def from_deepspeed(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Settings for `tenure.shard` from a ZeRO-3 configuration of DeepSpeed.

    Only what is written there counts; `"auto"` counts as left out. What `tenure.shard` does not do
    as asked is told in one warning.

    Example:
        >>> config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
        >>> tenure.sharding.from_deepspeed(config)
        {'param_dtype': torch.bfloat16}

    Args:
        config: The JSON file, or what is in it.

    Returns:
        Arguments by name: `tenure.shard(model, **tenure.sharding.from_deepspeed("ds.json"))`.

    Raises:
        InputError: It is no such configuration, or has a key that DeepSpeed does not know.
    """
    return _Reading(_loaded(config)).settings


def _loaded(config: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str | Path):
        raise InputError(f"a configuration is a JSON file or what is in it, not {config!r}")
    try:
        found = json.loads(Path(config).read_text(), object_pairs_hook=_distinct)
    except OSError as error:
        raise InputError(f"cannot read {config}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{config} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{config} is no configuration of DeepSpeed: it has no keys")
    return found


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """As DeepSpeed reads a file: a key that is there twice is a mistake."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = ", ".join(dict.fromkeys(f'"{key}"' for key in keys if keys.count(key) > 1))
        raise InputError(f"the configuration has {twice} more than once: leave one")
    return found


class _Reading:
    """One configuration on its way to settings."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.settings: dict[str, Any] = {}
        self._ignored: dict[str, list[str]] = {}  # keys by reason
        self._bytes = 4  # of one element when it is gathered
        zero = config.get("zero_optimization")
        if not isinstance(zero, Mapping) or zero.get("stage") not in (3, "3"):
            stage = zero.get("stage") if isinstance(zero, Mapping) else None
            raise InputError(
                f"tenure.shard is ZeRO-3, and the configuration asks for stage {stage}: "
                'set "stage": 3 in "zero_optimization"'
            )
        self._read(
            "",
            config,
            {
                "bf16": lambda given: self._half(given, "bf16", torch.bfloat16),
                "bfloat16": lambda given: self._half(given, "bfloat16", torch.bfloat16),
                "fp16": lambda given: self._half(given, "fp16", torch.float16),
                "communication_data_type": self._communication,
                "data_types": lambda given: self._read("data_types", given, {}),
                "zero_optimization": lambda _given: None,  # after the dtypes, which it counts in
            },
        )
        self._read(
            "zero_optimization",
            zero,
            {
                "stage": lambda _given: None,
                "offload_param": lambda given: self._offload("offload_param", given),
                "offload_optimizer": lambda given: self._offload("offload_optimizer", given),
                "cpu_offload": lambda given: self._set_offload(_true("cpu_offload", given)),
                "cpu_offload_param": lambda given: self._set_offload(
                    _true("cpu_offload_param", given)
                ),
                **_both("prefetch_bucket_size", self._prefetch),
                **_both("param_persistence_threshold", self._resident),
                **_both("max_live_parameters", self._live),
            },
        )
        if self._ignored:
            told = "; ".join(f"{', '.join(keys)}: {why}" for why, keys in self._ignored.items())
            warnings.warn(f"tenure.shard ignores {told}", stacklevel=3)

    def _read(self, where: str, given: Any, known: Mapping[str, Callable[[Any], None]]) -> None:
        """Each key is taken, told of, or refused."""
        if not isinstance(given, Mapping):
            raise InputError(f'"{where}" has keys in DeepSpeed, and here it is {given!r}')
        ignored = {
            key: why for why, keys in _IGNORED.get(where, {}).items() for key in keys.split()
        }
        for key, value in given.items():
            if isinstance(key, str) and key.startswith("_"):  # a comment, as some write them
                continue
            if key not in known and key not in ignored:
                raise InputError(_unknown(where, key, [*known, *ignored]))
            if value == "auto":
                continue
            if key in known:
                known[key](value)
            else:
                self._ignore(key, ignored[key])

    def _ignore(self, key: str, why: str) -> None:
        self._ignored.setdefault(why, []).append(key)

    def _half(self, given: Any, key: str, dtype: torch.dtype) -> None:
        if not isinstance(given, Mapping):
            raise InputError(f'"{key}" is {{"enabled": true}} in DeepSpeed, and here {given!r}')
        for inner in given:
            if inner not in _HALF.split():
                raise InputError(_unknown(key, inner, _HALF.split()))
        enabled = given.get("enabled", False)
        if enabled == "auto":
            return
        if _true(f'"enabled" of "{key}"', enabled):
            if "param_dtype" in self.settings:
                raise InputError("bf16 and fp16 are both enabled: choose one")
            self.settings["param_dtype"] = dtype
            self._bytes = dtype.itemsize
            if dtype is torch.float16:
                self._ignore(f"{key}'s loss scale", "torch.amp.GradScaler does that")

    def _communication(self, given: Any) -> None:
        if given is None:
            return
        if not isinstance(given, str) or given not in _TYPES:
            raise InputError(
                f'"communication_data_type" is one of {", ".join(_TYPES)}, not {given!r}'
            )
        self.settings["reduce_dtype"] = _TYPES[given]

    def _offload(self, where: str, given: Any) -> None:
        if given is None:
            return
        if not isinstance(given, Mapping):
            raise InputError(f'"{where}" is {{"device": "cpu"}} in DeepSpeed, and here {given!r}')
        for key in given:
            if key not in ("device", *_OFFLOAD.split()):
                raise InputError(_unknown(where, key, ["device", *_OFFLOAD.split()]))
        device = given.get("device", "none")
        if device == "nvme":
            raise InputError(f'"{where}" asks for nvme: tenure.shard offloads to "cpu" only')
        if device not in ("cpu", "none", "auto"):
            raise InputError(f'"device" of "{where}" is "cpu" or "none", not {device!r}')
        self._set_offload(device == "cpu")
        if device == "cpu" and set(given) > {"device"}:
            rest = ", ".join(key for key in given if key != "device")
            self._ignore(f"{rest} of {where}", "host memory is pinned and needs no settings")

    def _set_offload(self, asked: bool) -> None:
        if asked:
            self.settings["offload"] = True

    def _prefetch(self, given: Any) -> None:
        if _count("prefetch_bucket_size", given) == 0:
            self.settings["prefetch"] = 0
        else:
            self._ignore("prefetch_bucket_size", "`prefetch` says how many units go ahead")

    def _resident(self, given: Any) -> None:
        self.settings["keep_resident"] = _count("param_persistence_threshold", given)

    def _live(self, given: Any) -> None:
        self.settings["prefetch_bytes"] = _count("max_live_parameters", given) * self._bytes


def _both(key: str, take: Callable[[Any], None]) -> dict[str, Callable[[Any], None]]:
    """Under its name in the file and in DeepSpeed's code."""
    return {key: take, f"stage3_{key}": take}


def _count(key: str, given: Any) -> int:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < 1 << 62:
        raise InputError(f'"{key}" is a number of elements, not {given!r}')
    return int(given)


def _true(key: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise InputError(f"{key} is true or false, not {given!r}")
    return given


def _unknown(where: str, key: object, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(key), known, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    place = f' in "{where}"' if where else ""
    return f'DeepSpeed has no setting "{key}"{place}{hint}'
