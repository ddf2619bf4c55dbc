"""Trains as examples/trl_sft.py does, without offloading and with Tenure's, and runs that example.

Run by test_trl.py, as `sft_runs.py OUT`, in a process of its own, because of the stand-ins.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch

import tenure

ROOT = Path(__file__).resolve().parents[3]
# At the end: what is installed comes first.
sys.path.append(str(Path(__file__).parent / "standins"))

TRAINERS = [f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "kto", "reward")]


def load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def context_makers() -> set[object]:
    return {
        importlib.import_module(name).get_act_offloading_ctx_manager.__module__ for name in TRAINERS
    }


def run(recipe: Any, scratch: Path, *, offloading: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    sft = recipe.trainer(
        recipe.tiny_model(),
        recipe.tiny_dataset(),
        recipe.tiny_tokenizer(),
        output_dir=str(scratch),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        disable_tqdm=True,
        activation_offloading=offloading,
    )
    sft.train()
    trained = {n: p.detach() for n, p in sft.model.named_parameters() if p.requires_grad}
    return sft, trained


def losses(sft: Any) -> list[float]:
    return [entry["loss"] for entry in sft.state.log_history if "loss" in entry]


def printed_by_the_example(recipe: Any) -> str:
    out = io.StringIO()
    sys.argv = ["trl_sft.py", "--steps", "1"]
    with contextlib.redirect_stdout(out):
        recipe.main()
    return out.getvalue()


def main(out: Path) -> None:
    recipe = load(ROOT / "examples/trl_sft.py")
    before = context_makers()
    theirs = sys.modules[TRAINERS[0]].get_act_offloading_ctx_manager  # type: ignore[attr-defined]
    plain, plain_weights = run(recipe, out.parent, offloading=False)

    tenure.integrations.trl.enable(target="copy", min_bytes=1024)
    ours = context_makers()
    offloaded, weights = run(recipe, out.parent, offloading=True)
    offload = offloaded.maybe_activation_offload_context
    tenure.integrations.trl.disable()

    stats = offload.stats()
    out.write_text(
        json.dumps(
            {
                "makers": [sorted(before), sorted(ours), sorted(context_makers())],
                "signature": list(inspect.signature(theirs).parameters),
                "context": type(offload).__qualname__,
                "precision": offloaded.accelerator.mixed_precision,
                "checkpointed": offloaded.model.is_gradient_checkpointing,
                "losses": [losses(plain), losses(offloaded)],
                "adapters": len(weights),
                "adapters_equal": [
                    name for name in weights if torch.equal(weights[name], plain_weights[name])
                ],
                "steps": stats.steps,
                "moved_out": stats.moved_out_bytes,
                "moved_in": stats.moved_in_bytes,
                "printed": str(offload),
                "example": printed_by_the_example(recipe),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
