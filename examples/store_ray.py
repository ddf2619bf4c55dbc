"""Rollout and training with Ray actors: handles through Ray, tensors through the store.

    pip install ray
    python examples/store_ray.py [--rollouts 2] [--steps 40] [--rows 2048]

Ray places the actors and carries the handles, a few hundred bytes each; the tensors stay where
they were made until the trainer maps them. The driver has none of them, and says when they end: it
opens a scope for the step, adopts what the rollouts put, and when the block ends, by an exception
too, the store frees it in their processes. Weights are a scope for each version.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray
import store_bandit as bandit
import torch

import tenure

JOB = "store-ray-example"


class Rollout:
    def __init__(self, rank: int) -> None:
        tenure.store.join(JOB, "rollout", rank)
        self._rank = rank
        self._model = bandit.policy()

    def roll_out(self, step: int, rows: int, weights: dict[str, Any]) -> dict[str, Any]:
        for name, tensor in self._model.state_dict().items():
            weights[name].get(into=tensor)
        batch = bandit.rollout(self._model, rows, seed=1000 * step + self._rank)
        handles: dict[str, Any] = tenure.store.put_tree(
            tenure.store.scope("step", step), batch, collectors=["trainer"]
        )
        return handles

    def figures(self) -> dict[str, int]:
        return tenure.store.stats() | {"process": bandit.proportional_bytes()}


class Trainer:
    def __init__(self) -> None:
        tenure.store.join(JOB, "trainer", 0)
        self._model = bandit.policy()
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=0.05)

    def publish(self, version: int) -> dict[str, Any]:
        """The weights as they are now."""
        scope = tenure.store.scope("weights", version)
        handles: dict[str, Any] = tenure.store.put_tree(scope, dict(self._model.state_dict()))
        return handles

    def train(self, batches: list[dict[str, Any]]) -> float:
        return bandit.train(self._model, self._optimizer, tenure.store.get_tree(batches))

    def figures(self) -> dict[str, int]:
        return tenure.store.stats() | {"process": bandit.proportional_bytes()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows", type=int, default=2048)
    options = parser.parse_args()
    ray.init(include_dashboard=False, num_cpus=options.rollouts + 1)
    tenure.store.join(JOB, "driver")
    rollouts = [ray.remote(Rollout).remote(rank) for rank in range(options.rollouts)]
    trainer = ray.remote(Trainer).remote()

    sizes = []
    weights = tenure.store.scope("weights", 0)
    handles = weights.adopt(ray.get(trainer.publish.remote(0)))
    for step in range(options.steps):
        with tenure.store.scope("step", step) as scope:
            calls = [actor.roll_out.remote(step, options.rows, handles) for actor in rollouts]
            batches = scope.adopt(ray.get(calls))
            paid = ray.get(trainer.train.remote(batches))
        weights.close()
        weights = tenure.store.scope("weights", step + 1)
        handles = weights.adopt(ray.get(trainer.publish.remote(step + 1)))
        figures = ray.get([actor.figures.remote() for actor in [trainer, *rollouts]])
        sizes.append(sum(figure["process"] for figure in figures))
        if step % 10 == 0 or step == options.steps - 1:
            stored = sum(figure["bytes"] for figure in figures)
            print(
                f"step {step:3}  paid {paid:.2f}  the actors have {sizes[-1] / 1e6:.0f} MB, and "
                f"{stored / 1e3:.0f} KB stored",
                flush=True,
            )
    weights.close()

    put = ray.get([actor.figures.remote() for actor in rollouts])
    print(
        f"the rollouts put {sum(figure['put_objects'] for figure in put)} tensors, "
        f"{sum(figure['put_bytes'] for figure in put) / 1e6:.0f} MB, and have "
        f"{sum(figure['objects'] for figure in put)} of them now"
    )
    half = len(sizes) // 2
    grown = min(sizes[half:]) - min(sizes[: half or 1])  # what is at hand comes and goes
    print(f"paid {paid:.2f} at the end; memory grew by {grown / 1e6:.1f} MB from half to half")
    ray.shutdown()


if __name__ == "__main__":
    main()
