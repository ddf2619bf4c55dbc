"""Schedules: their orders are torch's, their files are too, and what cannot be one is told why."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tenure
from forks import run_forked
from tenure import pipelining
from tenure.pipelining.schedules import Action

IN_TORCH = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "zb-h1": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
SINGLE = ["gpipe", "1f1b"]
V = ["zb-v", "dualpipev"]
SIZES = list(itertools.product([1, 2, 3, 4, 6], [1, 2, 4, 5, 8, 12]))


def peer() -> Any:
    """Torch's own, which bring along all that compiles."""
    import torch.distributed.pipelining.schedules

    return torch.distributed.pipelining.schedules


def stages_for(ranks: int, chunks: int) -> list[Any]:
    """What torch's schedules ask of stages before they run."""
    return [
        SimpleNamespace(num_stages=ranks * chunks, group_size=ranks, group_rank=0, submod=None)
        for _ in range(chunks)
    ]


class Recorder:
    """A stage of torch's that does nothing but write down what it is told to do."""

    def __init__(self, index: int, stages: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.done: list[str] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.done.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.done.append(f"{self.stage_index}B{microbatch}")

    def no_messages(self, _: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages

    def perform_reduce_grad(self, _: int) -> None:
        pass


def torch_class(name: str) -> Any:
    return peer().get_schedule_class(IN_TORCH[name])


def run_single(name: str, rank: int, ranks: int, microbatches: int) -> list[str]:
    # Its own table of 1F1B's order numbers the last rank's forwards from 1: what it runs counts.
    stage = Recorder(rank, ranks)
    schedule = torch_class(name)(stage, microbatches)
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches()
    return stage.done


def compute(actions: list[Any]) -> list[str]:
    """Actions of torch's without waiting and messages, overlapped ones one after the other."""
    out = []
    for action in actions:
        if action is None or not action.is_compute_op:
            continue
        out += map(str, action.sub_actions or [action])
    return out


def torch_schedule(name: str, ranks: int, microbatches: int, chunks: int) -> Any:
    return torch_class(name)(stages_for(ranks, chunks), microbatches)


def ours(schedule: pipelining.Schedule) -> list[list[str]]:
    return [list(map(str, schedule.actions(rank))) for rank in range(schedule.ranks)]


@pytest.mark.parametrize("name", SINGLE)
def test_orders_of_one_stage_a_rank_are_those_that_torch_runs(name: str) -> None:
    compared = 0
    for ranks, microbatches in SIZES:
        if name == "1f1b" and microbatches < ranks:
            continue  # torch has none
        want = [run_single(name, rank, ranks, microbatches) for rank in range(ranks)]
        assert ours(pipelining.schedule(name, ranks, microbatches)) == want
        compared += 1
    assert compared >= 20


@pytest.mark.parametrize("name", sorted(set(IN_TORCH) - set(SINGLE)))
def test_orders_of_several_stages_a_rank_are_those_of_torch(name: str) -> None:
    compared = 0
    for (ranks, microbatches), chunks in itertools.product(SIZES, [2] if name in V else [1, 2, 3]):
        try:
            theirs = torch_schedule(name, ranks, microbatches, chunks)
        except ValueError:  # sizes that it cannot have
            with pytest.raises(tenure.InputError):
                pipelining.schedule(name, ranks, microbatches, chunks)
            continue
        want = [compute(theirs.pipeline_order[rank]) for rank in range(ranks)]
        found = pipelining.schedule(name, ranks, microbatches, chunks)
        assert ours(found) == want, (ranks, microbatches, chunks)
        assert dict(enumerate(found.rank_of_stage)) == theirs.stage_index_to_group_rank
        compared += 1
    assert compared >= 10


@pytest.mark.parametrize("name", IN_TORCH)
def test_torch_loads_what_is_written(tmp_path: Path, name: str) -> None:
    schedule = pipelining.schedule(name, ranks=3, microbatches=6)
    file = tmp_path / "mine.csv"
    file.write_text(schedule.csv())
    theirs = peer()._PipelineScheduleRuntime(stages_for(3, schedule.stages // 3), 6)
    theirs._load_csv(str(file))
    assert [compute(theirs.pipeline_order[rank]) for rank in range(3)] == ours(schedule)
    assert theirs.stage_index_to_group_rank == dict(enumerate(schedule.rank_of_stage))


@pytest.mark.parametrize("what", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", sorted(set(IN_TORCH) - set(SINGLE)))
def test_what_torch_writes_is_read(tmp_path: Path, name: str, what: str) -> None:
    file = tmp_path / "theirs.csv"
    torch_schedule(name, ranks=3, microbatches=6, chunks=2)._dump_csv(str(file), what)
    found = pipelining.schedule(file, ranks=3, microbatches=6)
    assert found.name == "theirs"
    assert ours(found) == ours(pipelining.schedule(name, ranks=3, microbatches=6, chunks=2))


def test_a_file_may_be_named_by_text(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0B0\n")
    assert ours(pipelining.schedule(str(file), 1, 1)) == [["0F0", "0B0"]]


def test_a_file_may_begin_with_the_mark_of_a_spreadsheet(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n")
    assert ours(pipelining.schedule(file, 1, 1)) == [["0F0", "0B0"]]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"0F0,0X0\n", r"row 0, cell 1: '0X0'"),
        (b"0F0,0B0\n1B0,1F0\n", r"rank 1, cell 0 \(1B0\)"),
        (b"", "no action"),
        (b"\xff\xfe0\x00F\x00", "cannot be read"),
    ],
)
def test_a_file_that_is_no_schedule_is_named(tmp_path: Path, text: bytes, complaint: str) -> None:
    file = tmp_path / "mine.csv"
    file.write_bytes(text)
    with pytest.raises(tenure.InputError, match=complaint) as caught:
        pipelining.schedule(file, 1, 1)
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(tenure.InputError, match=r"none\.csv cannot be read"):
        pipelining.schedule(tmp_path / "none.csv", 1, 1)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (1, 2)])
def test_a_file_of_other_sizes_is_refused(tmp_path: Path, ranks: int, microbatches: int) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0B0\n")
    with pytest.raises(tenure.InputError, match="of 1 ranks and 1 microbatches"):
        pipelining.schedule(file, ranks, microbatches)


def test_a_file_of_other_chunks_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0B0\n")
    with pytest.raises(tenure.InputError, match="stage"):
        pipelining.schedule(file, 1, 1, chunks=3)


@pytest.mark.parametrize("name", IN_TORCH)
def test_names_are_found_however_they_are_written(name: str) -> None:
    in_torch = IN_TORCH[name]
    spelled = [name, name.upper(), name.replace("-", "_"), name.replace("-", ""), in_torch]
    spelled += [in_torch.lower(), in_torch.upper()]
    found = {one: pipelining.schedule(one, ranks=2, microbatches=4).name for one in spelled}
    assert found == dict.fromkeys(spelled, name)


def test_all_names_are_listed() -> None:
    assert pipelining.schedule_names() == list(IN_TORCH)


@pytest.mark.parametrize("name", ["", "zb", "dual pipe", "Schedule1F1B", "mine.txt"])
def test_an_unknown_name_is_told_those_that_there_are(name: str) -> None:
    with pytest.raises(tenure.InputError, match=f"no schedule '{name}'.*interleaved-1f1b"):
        pipelining.schedule(name, 2, 4)


@pytest.mark.parametrize("what", ["ranks", "microbatches", "chunks"])
@pytest.mark.parametrize("size", [0, -1, 1 << 20, 1 << 40, 2.0, "2", True, None])
def test_a_size_is_a_whole_number(what: str, size: Any) -> None:
    if what == "chunks" and size is None:
        assert pipelining.schedule("looped-bfs", 2, 4, chunks=None).stages == 4
        return
    sizes = {"ranks": 2, "microbatches": 4, "chunks": 1} | {what: size}
    with pytest.raises(tenure.InputError, match=f"{what} is a whole number from 1 on"):
        pipelining.schedule("looped-bfs", **sizes)


def test_actions_are_read_as_they_are_written() -> None:
    schedule = pipelining.schedule("zb-h1", ranks=1, microbatches=1)
    assert schedule.actions(0) == [Action(0, "F", 0), Action(0, "I", 0), Action(0, "W", 0)]


def test_a_schedule_tells_its_sizes_and_places() -> None:
    schedule = pipelining.schedule("zb-v", ranks=2, microbatches=5)
    assert (schedule.ranks, schedule.stages, schedule.microbatches) == (2, 4, 5)
    assert schedule.rank_of_stage == [0, 1, 1, 0]
    assert schedule.stages_of(0) == [0, 3]


def test_a_bound_says_what_waits_for_weights() -> None:
    schedule = pipelining.schedule("zb-h1", ranks=4, microbatches=8)
    bounds = [schedule.bound(rank) for rank in range(4)]
    assert [bound.in_flight for bound in bounds] == [4, 4, 4, 4]
    assert [bound.waiting for bound in bounds] == [0, 1, 2, 3]


def test_bytes_are_those_of_each_stage() -> None:
    schedule = pipelining.schedule("zb-v", ranks=1, microbatches=1)
    assert schedule.peak_bytes(0, [(100, 10), (1000, 20)]) == 1100


@pytest.mark.parametrize("count", [0, 1, 3])
def test_bytes_are_for_as_many_stages_as_a_rank_has(count: int) -> None:
    schedule = pipelining.schedule("zb-v", ranks=2, microbatches=4)
    with pytest.raises(tenure.InputError, match=f"rank 1 has 2 stages, not {count}"):
        schedule.peak_bytes(1, [(1, 1)] * count)


def test_a_bubble_is_the_part_of_the_time_without_work() -> None:
    schedule = pipelining.schedule("gpipe", ranks=3, microbatches=4)
    found = schedule.timeline(forward=1, input_backward=0.5, weight_backward=0.5)
    assert found.bubbles == pytest.approx([2 / 6] * 3)


def test_a_timeline_says_when_each_action_runs() -> None:
    schedule = pipelining.schedule("1f1b", ranks=2, microbatches=1)
    found = schedule.timeline(forward=1, input_backward=2, weight_backward=3, message=0.5)
    spans = {
        rank: [(str(span.action), span.begin, span.end) for span in row]
        for rank, row in found.spans.items()
    }
    assert spans == {
        0: [("0F0", 0, 1), ("0B0", 8, 13)],
        1: [("1F0", 1.5, 2.5), ("1B0", 2.5, 7.5)],
    }
    assert found.length == 13


def test_a_timeline_has_the_ranks_that_are_asked_for() -> None:
    schedule = pipelining.schedule("1f1b", ranks=4, microbatches=4)
    some, every = schedule.timeline(ranks=[2, 0]), schedule.timeline()
    assert list(some.spans) == [2, 0]
    assert some.spans[2] == every.spans[2]
    assert some.bubbles == every.bubbles
    assert len(every.spans) == 4


def test_a_rank_that_there_is_not_is_an_error() -> None:
    asks = ["actions(2)", "timeline(ranks=[2])", "peak_bytes(2, [])", "bound(2)", "bound(1 << 31)"]
    program = f"""
import sys
import tenure
from tenure import pipelining
schedule = pipelining.schedule("1f1b", ranks=2, microbatches=2)
for ask in {asks}:
    try:
        eval("schedule." + ask)
    except (IndexError, tenure.InputError):
        print(ask, flush=True)
    except BaseException as error:
        print(ask, repr(error), file=sys.stderr)
"""
    # In a program of its own, which is lost if it reads there.
    done = run_forked(["-c", program])
    assert (done.returncode, done.stdout.splitlines()) == (0, asks), done.stderr
