"""The training loop: what every way to split it must give, resuming, and what it leaves behind."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

import tenure
from ranks import run_ranks
from tenure import _C

DATA = str(Path(json.__file__).parent)
STEPS = 6
SCALARS = 64
"""Bytes of the last norm, say, that Gloo's thread still holds."""
FIT = 1_750_000
"""Bytes into which a step of 16 rows of 32 tokens in two microbatches does not fit by itself."""
SMALL_MESSAGE = 64 + 4 * (2 * 16 * 16)
"""Bytes of one of 2 rows of 16 tokens."""
MESSAGE = 64 + 4 * (8 * 32 * 16)
"""Bytes of one of 8 rows of 32 tokens, which is read at once, or is under way for a while."""
SCHEDULES = ["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v", "dualpipev"]


@dataclass
class Heard:
    """A listener that keeps all it is told."""

    stop_at: int = 10**9
    reports: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    saved_at: list[str] = field(default_factory=list)

    def stepped(self, report: dict[str, Any]) -> bool:
        self.reports.append(report)
        return report["step"] < self.stop_at

    def evaluated(self, step: int, loss: float) -> None:
        self.evaluations.append((step, loss))

    def sampled(self, _step: int, _prompt: list[int], tokens: list[int]) -> None:
        self.samples.append(tokens)

    def saved(self, _step: int, path: str) -> None:
        self.saved_at.append(path)


def tiny(kind: str = "gpt2", vocab: int = 256) -> _C.TrainConfig:
    return _C.TrainConfig(
        kind=kind, layers=4, heads=2, kv_heads=2 if kind == "gpt2" else 1, width=16, hidden=32,
        vocab=vocab, context=32, tied=kind == "gpt2",
    )  # fmt: skip


def job(model: _C.TrainConfig | None = None, **options: Any) -> _C.TrainJob:
    chosen: dict[str, Any] = {
        "rows": 8,
        "length": 16,
        "microbatches": 4,
        "steps": STEPS,
        "learning_rate": 1e-2,
        "warm_up": 2,
        "eps": 1e-4,  # gradients that are nothing but rounding (a key's bias) stay without effect
        "seed": 7,
        "timeout": 30.0,
    }
    chosen.update(options)
    return _C.TrainJob(model or tiny(), DATA, **chosen)


def trainer(of: _C.TrainJob, rank: int, pp: int, dp: int) -> _C.Trainer:
    """Rank r is rank r // dp of pipeline r % dp."""

    def mine(all_groups: list[list[int]]) -> Any:
        made = [dist.new_group(ranks, timeout=timedelta(seconds=30)) for ranks in all_groups]
        return next(group for group, ranks in zip(made, all_groups, strict=True) if rank in ranks)

    pipe = mine([[stage * dp + replica for stage in range(pp)] for replica in range(dp)])
    data = mine([[stage * dp + replica for replica in range(dp)] for stage in range(pp)])
    store = dist.PrefixStore(f"stage{rank // dp}", dist.distributed_c10d._get_default_store())
    return _C.Trainer(
        of,
        pipe_up=pipe,
        pipe_down=pipe,
        pipe_side=pipe,
        data_group=data,
        data_side=data,
        world_side=dist.group.WORLD,
        store=store,
    )


def trained(
    rank: int, _ranks: int, pp: int, dp: int, options: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], Heard]:
    torch.manual_seed(0)
    options = dict(options)
    kind = options.pop("kind", "gpt2")
    stop_at = options.pop("stop_at", 10**9)
    one = trainer(job(tiny(kind), pp=pp, dp=dp, **options), rank, pp, dp)
    heard = Heard(stop_at)
    one.run(heard)
    return heard.reports, dict(one.weights()), heard


def all_trained(
    rank: int, ranks: int, pp: int, dp: int, every: list[dict[str, Any]]
) -> list[tuple[list[dict[str, Any]], dict[str, torch.Tensor], Heard]]:
    return [trained(rank, ranks, pp, dp, options) for options in every]


def run(pp: int = 1, dp: int = 1, **options: Any) -> list[Any]:
    return run_ranks(trained, pp * dp, pp, dp, options)


def run_each(pp: int, dp: int, every: list[dict[str, Any]]) -> list[list[Any]]:
    """One job after the other in the same processes, which take seconds to start."""
    by_rank = run_ranks(all_trained, pp * dp, pp, dp, every)
    return [list(results) for results in zip(*by_rank, strict=True)]


@cache
def plain(kind: str = "gpt2", rows: int = 8) -> list[Any]:
    return run(kind=kind, rows=rows)


def weights(results: list[Any]) -> dict[str, torch.Tensor]:
    merged: dict[str, torch.Tensor] = {}
    for _, own, _ in results:
        for name, value in own.items():
            if name in merged:  # copies of a tied matrix, replicas
                assert torch.equal(merged[name], value), name
            merged[name] = value
    return merged


def losses(results: list[Any]) -> list[float]:
    return [report["loss"] for report in results[0][0]]


def same(results: list[Any], others: list[Any], tolerance: float = 0.0) -> None:
    ours, theirs = weights(results), weights(others)
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(losses(results), losses(others), rtol=0, atol=tolerance)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=tolerance, msg=name)


def figures(results: list[Any], name: str, rank: int) -> list[int]:
    return [report["ranks"][rank][name] for report in results[0][0]]


def assert_fits(results: list[Any], rank: int, budget: int) -> None:
    """From when there is a plan and it is proven."""
    most = figures(results, "fitted", rank)[2:]
    assert all(one is not None and 0 < one <= budget for one in most), most


def assert_flat(figures: list[int], more: int = 0) -> None:
    """The lowest do not rise: Gloo's thread may hold what it added up last for a moment longer.

    A peak may have `more` where what is under way between ranks has not been read yet.
    """
    half = len(figures) // 2
    assert abs(min(figures[half:]) - min(figures[:half])) <= SCALARS + more, figures


class TestPlain:
    def test_is_what_pytorch_does(self) -> None:
        """The loop by hand, from torch's own parts."""
        ours = plain()
        found, learned = run_ranks(by_hand, 1)[0]
        assert losses(ours) == found
        for name, value in weights(ours).items():
            assert torch.equal(value, learned[name]), name

    def test_learns(self) -> None:
        results = run(steps=60)
        assert losses(results)[-1] < losses(results)[0] - 1


def by_hand(_rank: int, _ranks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = _C.TrainStage(tiny(), seed=7)
    named = dict(model.named_weights())
    matrices = [value for value in named.values() if value.dim() >= 2]
    others = [value for value in named.values() if value.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-4, fused=True)
    tokens = _C.TrainTokens.open(DATA)
    batches = _C.TrainBatches(tokens, rows=8, length=16, seed=7)
    found = []
    for step in range(STEPS):
        x, y = batches.next()
        total = torch.zeros(())
        for one, target in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = _C.train_loss(model(one), target)
            loss.backward(torch.tensor(0.25))  # type: ignore[no-untyped-call]
            total = total + loss.detach() * 0.25
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0, foreach=True)
        warming = 1e-2 * (step + 1) / 2
        done = torch.tensor((step - 2) / (STEPS - 2), dtype=torch.float64)
        cosine = 1e-2 * (1 + torch.cos(torch.pi * done).item()) / 2
        for group in optimizer.param_groups:
            group["lr"] = warming if step < 2 else cosine
        optimizer.step()
        optimizer.zero_grad()
        found.append(total.item())
    return found, {name: value.detach() for name, value in named.items()}


class TestSplit:
    def test_in_a_pipeline_it_learns_the_same(self, tmp_path: Path) -> None:
        """By every schedule and one of one's own.

        Not to the bit: norms of parts are added up in another order, and scale gradients.
        """
        path = tmp_path / "mine.csv"
        path.write_text(tenure.pipelining.schedule("1f1b", 2, 4).csv())
        every = [{"schedule": name} for name in [*SCHEDULES, str(path)]]
        every += [{"schedule": name, "kind": "llama"} for name in ("1f1b", "zb-h1", "zb-v")]
        for options, results in zip(every, run_each(2, 1, every), strict=True):
            print(options)
            same(results, plain(options.get("kind", "gpt2")), 2e-6)

    def test_over_data_parallel_ranks(self) -> None:
        every = [{"zero": zero, "rows": 4, "microbatches": 2} for zero in (0, 3)]
        for results in run_each(1, 2, every):
            same(results, plain(), 5e-6)

    def test_both_ways(self) -> None:
        every: list[dict[str, Any]] = [{"zero": 0}, {"zero": 3}]
        every.append({"zero": 3, "recompute": True, "offload": "all", "schedule": "zb-v"})
        every = [{"rows": 4, "microbatches": 4, **options} for options in every]
        for options, results in zip(every, run_each(2, 2, every), strict=True):
            print(options)
            same(results, plain(), 5e-6)


class TestMemory:
    def test_weights_that_come_and_go_stay_flat(self) -> None:
        """Layer by layer, without a pipeline."""
        for reports, _, _ in run(dp=2, zero=3, steps=20):
            for rank in (0, 1):
                assert_flat([report["ranks"][rank]["allocated"] for report in reports[3:]])

    def test_moved_or_made_again_it_is_the_same(self) -> None:
        every = [
            {"offload": offload, "recompute": recompute}
            for offload in ("none", "all")
            for recompute in (False, True)
        ]
        for results in run_each(1, 1, every):
            same(results, plain())

    def test_recomputing_takes_less(self) -> None:
        stored, again = (
            results[0][0][-1]["ranks"][0]["activations"]
            for results in run_each(1, 1, [{"recompute": False}, {"recompute": True}])
        )
        assert again < stored / 2

    @pytest.mark.parametrize(("pp", "dp"), [(1, 1), (2, 1), (2, 2)])
    def test_is_flat_and_within_the_bound(self, pp: int, dp: int) -> None:
        every: list[dict[str, Any]] = [{"steps": 20}]
        if pp > 1:
            every += [{"steps": 20, "schedule": "zb-h1"}, {"steps": 20, "zero": 3}]
        for reports, _, _ in (rank for results in run_each(pp, dp, every) for rank in results):
            for rank in range(len(reports[0]["ranks"])):
                settled = [report["ranks"][rank] for report in reports[3:]]
                assert_flat([one["allocated"] for one in settled])
                assert_flat([one["peak"] for one in settled], 4 * SMALL_MESSAGE if pp > 1 else 0)
                for one in settled:
                    assert one["in_flight"] <= one["in_flight_bound"]
                    assert 0 < one["activations"] <= one["activations_bound"]

    @pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
    def test_what_is_elsewhere_is_within_the_bound(self, schedule: str) -> None:
        """That of a run without: what was moved or dropped counts as if it were there."""
        ways = [{}, {"offload": "all"}, {"offload": "budget", "offload_budget": 2_600_000}]
        ways += [{"fit": 2_600_000}]
        options = {"rows": 32, "length": 32, "steps": 8, "schedule": schedule}
        without, *others = run_each(2, 1, [{**options, **way} for way in ways])
        for rank in (0, 1):
            bound = min(figures(without, "activations_bound", rank)[2:])
            for results in (without, *others):
                for has, its in zip(
                    figures(results, "activations", rank)[2:],
                    figures(results, "activations_bound", rank)[2:],
                    strict=True,
                ):
                    assert has <= its
                    assert its == pytest.approx(bound, abs=4 * MESSAGE)


class TestFit:
    @pytest.mark.parametrize("kind", ["gpt2", "llama"])
    def test_learns_the_same_in_less(self, kind: str) -> None:
        options = {"kind": kind, "rows": 16, "length": 32, "microbatches": 2}
        fitted, without = run_each(1, 1, [{**options, "fit": FIT}, options])
        same(fitted, without)
        assert_fits(fitted, 0, FIT)
        assert min(figures(without, "peak", 0)) > FIT

    def test_sharded(self) -> None:
        """Of weights that come and go nothing is made again, of the rest it is."""
        budget = 2_080_000
        options = {"rows": 16, "length": 32, "microbatches": 2, "zero": 3}
        fitted, without = run_each(1, 2, [{**options, "fit": budget}, options])
        same(fitted, without)
        for rank in (0, 1):
            assert_fits(fitted, rank, budget)
            assert max(figures(fitted, "fitted", rank)[2:]) < min(figures(without, "peak", rank))

    @pytest.mark.parametrize(
        ("schedule", "budget"),
        [("1f1b", 1_500_000), ("interleaved-1f1b", FIT), ("zb-h1", 2_600_000), ("zb-v", FIT)],
    )
    def test_in_a_pipeline(self, schedule: str, budget: int) -> None:
        """By schedules that do all of a backward at once, or in two halves."""
        options = {"rows": 32, "length": 32, "microbatches": 4, "schedule": schedule}
        fitted, without = run_each(2, 1, [{**options, "fit": budget}, options])
        same(fitted, without)
        for rank in (0, 1):
            assert_fits(fitted, rank, budget)

    def test_is_flat(self) -> None:
        for reports, _, _ in run(fit=FIT, rows=16, length=32, microbatches=2, steps=20):
            for figure in ("allocated", "peak"):
                assert_flat([report["ranks"][0][figure] for report in reports[3:]])

    def test_a_budget_that_cannot_be_met_says_the_least(self) -> None:
        with pytest.raises(AssertionError, match=r"the budget of 3.* KiB cannot be met: with all"):
            run(fit=400_000, rows=16, length=32, microbatches=2)


class TestMeanwhile:
    def test_evaluates_and_samples(self) -> None:
        """A pipeline says what one rank says."""
        options = {"evaluate_every": 3, "sample_every": 6, "sample_tokens": 8}
        results = [run(pp=pp, **options) for pp in (1, 2)]
        for _, _, heard in (rank for ranks in results for rank in ranks):
            assert [step for step, _ in heard.evaluations] == [3, 6]
            assert all(4 < loss < 6 for _, loss in heard.evaluations)
            assert [len(tokens) for tokens in heard.samples] == [8]
        alone, split = (ranks[0][2] for ranks in results)
        assert alone.samples == split.samples
        torch.testing.assert_close(alone.evaluations, split.evaluations, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("kind", ["gpt2", "llama"])
    def test_asking_changes_nothing(self, kind: str) -> None:
        """Nor what a step may hold: a sample's rows have another length than a step's."""
        asking = {"evaluate_every": 2, "sample_every": 1, "sample_tokens": 2, "prompt": "A"}
        same(*run_each(1, 1, [{"kind": kind, **of} for of in (asking, {"evaluate_every": 100})]))

    def test_all_ranks_stop_when_one_has_enough(self, tmp_path: Path) -> None:
        results = run(pp=2, steps=50, stop_at=4, checkpoints=str(tmp_path))
        ends = {reports[-1]["step"] for reports, _, _ in results}
        assert len(ends) == 1
        assert 4 <= ends.pop() <= 5
        assert all(len(heard.saved_at) == 1 for _, _, heard in results)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run(checkpoints=str(folder))
    return folder


class TestCheckpoints:
    @pytest.mark.parametrize(
        "ways",
        [
            {},
            {"pp": 2},
            {"dp": 2, "zero": 3, "rows": 4},
            {"pp": 2, "dp": 2, "zero": 3},
            {"rows": 16, "length": 32, "microbatches": 2, "fit": FIT},
        ],
        ids=str,
    )
    def test_a_resumed_run_is_the_unbroken_one(self, ways: dict[str, Any], tmp_path: Path) -> None:
        rest = {name: value for name, value in ways.items() if name not in ("pp", "dp")}
        saving = {**rest, "checkpoints": str(tmp_path), "save_every": 2, "stop_at": 2}
        unbroken, first = run_each(ways.get("pp", 1), ways.get("dp", 1), [rest, saving])
        assert len(first[0][0]) < STEPS
        # What was saved beyond step 2 goes: as if the run had been killed.
        for path in tmp_path.iterdir():
            if path.name > "step-000002":
                shutil.rmtree(path)
        second = run(**ways, checkpoints=str(tmp_path), resume=True)
        assert [report["step"] for report in second[0][0]] == [3, 4, 5, 6]
        assert losses(second) == losses(unbroken)[2:]
        for name, value in weights(unbroken).items():
            assert torch.equal(weights(second)[name], value), name

    def test_goes_on_with_other_ranks(self, tmp_path: Path) -> None:
        run(pp=2, dp=2, rows=4, zero=3, steps=2, checkpoints=str(tmp_path))
        there = {"checkpoints": str(tmp_path), "resume": True, "keep": 0}
        resumed = run(**there)
        assert [report["step"] for report in resumed[0][0]] == [3, 4, 5, 6]

    def test_keeps_as_many_as_it_is_told(self, tmp_path: Path) -> None:
        run(checkpoints=str(tmp_path), save_every=1, keep=3)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "step-000004",
            "step-000005",
            "step-000006",
        ]

    def test_hugging_face_loads_them(self, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        results = run(pp=2, checkpoints=str(tmp_path))
        model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "step-000006")
        theirs = dict(model.named_parameters())
        for name, value in weights(results).items():
            assert torch.equal(theirs[name], value), name

    @pytest.mark.parametrize("file", ["checkpoint.json", "model-00001-of-00001.safetensors"])
    @pytest.mark.parametrize("how", ["cut", "changed", "gone"])
    def test_a_damaged_one_is_refused(
        self, whole: Path, file: str, how: str, tmp_path: Path
    ) -> None:
        shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
        path = tmp_path / "step-000006" / file
        content = bytearray(path.read_bytes())
        content[-9] ^= 1
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(content[:-9] if how == "cut" else content)
        again = job(checkpoints=str(tmp_path), resume=True)
        if file == "checkpoint.json" and how == "changed":
            content[-9] ^= 1
            path.write_bytes(bytes(content).replace(b'"hash"', b'"harsh"'))
        with pytest.raises(tenure.InputError, match="is damaged: .*remove it to go on"):
            again.check(1)

    def test_of_another_step_is_refused(self, whole: Path, tmp_path: Path) -> None:
        shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
        path = tmp_path / "step-000006" / "checkpoint.json"
        path.write_text(path.read_text().replace('"step": 6', '"step": 4'))
        with pytest.raises(tenure.InputError, match="is damaged: .* step 4 in .*step-000006"):
            job(checkpoints=str(tmp_path), resume=True).check(1)

    def test_of_another_model_is_refused(self, whole: Path) -> None:
        with pytest.raises(tenure.InputError, match="another model"):
            job(tiny("llama"), checkpoints=str(whole), resume=True).check(1)

    def test_what_was_not_finished_is_not_read(self, tmp_path: Path) -> None:
        run(checkpoints=str(tmp_path), steps=2)
        (tmp_path / "step-000009.partial").mkdir()
        resumed = run(checkpoints=str(tmp_path), resume=True)
        assert resumed[0][0][0]["step"] == 3
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000006"]


class TestBadJobs:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"pp": 8}, "more stages than layers"),
            ({"pp": 2, "vpp": 4, "schedule": "interleaved-1f1b"}, "more stages than layers"),
            ({"microbatches": 3}, "cannot be split into 3 microbatches"),
            ({"length": 64}, "longer than the model's context, 32"),
            ({"steps": 0}, "number of steps must be 1 or more"),
            ({"rows": 0}, "rows of a batch"),
            ({"schedule": "2f2b"}, "2f2b"),
            ({"offload": "budget", "offload_budget": 1 << 10}, "budget of 1.0 KiB cannot be met"),
            ({"fit": 1 << 10}, "a budget of 1.0 KiB cannot be met"),
            ({"fit": 1 << 30, "offload": "all"}, "a fit moves .*: leave offload out"),
            ({"fit": 1 << 30, "recompute": True}, "a fit makes again .*: leave recompute out"),
            ({"validation": "nowhere.txt", "evaluate_every": 1}, "nowhere.txt"),
            ({"weights": "nowhere"}, "nowhere"),
            ({"resume": True}, "nothing to resume from"),
            ({"clip": -1.0}, "clipped"),
            ({"learning_rate": float("nan")}, "learning rate"),
            ({"beta1": 1.0}, "beta1"),
            ({"sample_every": 1, "prompt": ""}, "prompt"),
            ({"sample_every": 1, "prompt": "q\u00e9"}, "one of them 195, and the model has 128"),
            ({"timeout": 0.0}, "timeout"),
        ],
    )
    def test_say_so_in_a_sentence(self, options: dict[str, Any], words: str) -> None:
        model = tiny(vocab=128) if "prompt" in options else None
        wrong = job(model, **options)
        with pytest.raises(tenure.InputError, match=words):
            wrong.check(options.get("pp", 1))

    def test_for_other_ranks(self) -> None:
        with pytest.raises(tenure.InputError, match=r"for 4 ranks \(pp 2 times dp 2\).* are 3"):
            job(pp=2, dp=2).check(3)

    def test_a_text_of_three_bytes(self, tmp_path: Path) -> None:
        path = tmp_path / "short.txt"
        path.write_text("abc")
        with pytest.raises(tenure.InputError, match="too short"):
            _C.TrainJob(tiny(), str(path), steps=1, length=16).check(1)

    def test_zero_of_a_stage_that_there_is_not(self) -> None:
        with pytest.raises(tenure.InputError, match="stage 0.* or 3"):
            job(zero=2)

    def test_a_file_with_a_deadlock(self, tmp_path: Path) -> None:
        path = tmp_path / "stuck.csv"
        path.write_text("0F0,0B0,0F1,0B1\n1B0,1F0,1F1,1B1\n")
        with pytest.raises(tenure.InputError, match=r"stuck\.csv|1B0"):
            job(pp=2, microbatches=2, schedule=str(path)).check(2)

    def test_a_file_that_trains_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "forward.csv"
        path.write_text("0F0,0F1\n1F0,1F1\n")
        with pytest.raises(tenure.InputError, match=r"forward\.csv has no backward"):
            job(pp=2, microbatches=2, schedule=str(path)).check(2)
