"""Rollout and training under plain torchrun: tensors through the store, handles through Gloo.

    torchrun --nproc-per-node 3 examples/store_torchrun.py [--steps 40] [--rows 2048]

Rank 0 trains, the others roll out. A step is a scope: what the rollouts put in it is for the
trainer alone, goes when that has fetched it, and is gone when the step has ended whatever happened.
Weights are a scope for each version: the trainer puts one, each rollout fetches it into its own
parameters, and the version before is closed. Its handles say so to whoever comes late with one.
"""

from __future__ import annotations

import argparse
from typing import Any

import store_bandit as bandit
import torch
from torch import distributed as dist
from torch import nn

import tenure
from tenure.store import Handle, Scope


def publish(model: nn.Module, version: int) -> tuple[Scope, dict[str, Handle]]:
    """The weights as they are now, until the scope is closed."""
    scope = tenure.store.scope("weights", version)
    handles: dict[str, Handle] = tenure.store.put_tree(scope, dict(model.state_dict()))
    return scope, handles


def load(model: nn.Module, handles: dict[str, Handle]) -> None:
    for name, tensor in model.state_dict().items():
        handles[name].get(into=tensor)


def sent_to_all(thing: Any) -> Any:
    """What rank 0 has, on every rank."""
    box = [thing]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def trainer(options: argparse.Namespace) -> None:
    model = bandit.policy()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    weights, handles = publish(model, 0)
    first = sent_to_all(handles)
    sizes = []
    for step in range(options.steps):
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(None, gathered)
        batches = tenure.store.get_tree(gathered[1:])  # one fetch from each owner, all at once
        paid = bandit.train(model, optimizer, batches)
        del batches
        weights.close()  # every rollout had it before it put anything
        weights, handles = publish(model, step + 1)
        sent_to_all(handles)
        sizes.append(bandit.proportional_bytes())
        if step % 10 == 0 or step == options.steps - 1:
            stored = tenure.store.stats()["bytes"]
            print(
                f"step {step:3}  paid {paid:.2f}  the trainer's process has {sizes[-1] / 1e6:.0f} "
                f"MB, and {stored / 1e3:.0f} KB stored",
                flush=True,
            )
    try:
        first["weight"].get()
    except tenure.StaleHandle as error:
        print(f"version 0, asked for now: {error}")
    dist.barrier()
    weights.close()
    half = len(sizes) // 2
    grown = min(sizes[half:]) - min(sizes[: half or 1])  # what is at hand comes and goes
    print(f"paid {paid:.2f} at the end; memory grew by {grown / 1e6:.1f} MB from half to half")


def rollout(options: argparse.Namespace) -> None:
    model = bandit.policy()
    load(model, sent_to_all(None))
    for step in range(options.steps):
        with tenure.store.scope("step", step) as scope:
            batch = bandit.rollout(model, options.rows, seed=1000 * step + dist.get_rank())
            dist.gather_object(tenure.store.put_tree(scope, batch, collectors=["trainer"]))
            load(model, sent_to_all(None))  # there is a next version: the step was trained on
    dist.barrier()
    stats = tenure.store.stats()
    print(
        f"rollout {dist.get_rank()}: put {stats['put_objects']} tensors, "
        f"{stats['put_bytes'] / 1e6:.0f} MB, and has {stats['objects']} of them now"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows", type=int, default=2048)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    role = "trainer" if dist.get_rank() == 0 else "rollout"
    tenure.store.join(role=role)  # the job and the rank are torchrun's
    (trainer if role == "trainer" else rollout)(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
