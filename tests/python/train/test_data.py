"""Token sources and batches."""

from __future__ import annotations

import struct
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
import torch

from tenure import InputError
from tenure._C import TrainBatches, TrainTokens


def bin_file(
    path: Path,
    tokens: list[int],
    *,
    magic: int = 20240520,
    version: int = 1,
    count: int | None = None,
) -> str:
    header = [magic, version, len(tokens) if count is None else count] + [0] * 253
    kind = "I" if magic == 20240801 else "H"
    path.write_bytes(struct.pack("<256i", *header) + struct.pack(f"<{len(tokens)}{kind}", *tokens))
    return str(path)


def text_of(tmp_path: Path, size: int = 1000) -> TrainTokens:
    (tmp_path / "x.txt").write_bytes(bytes(i % 251 for i in range(size)))
    return TrainTokens.open(str(tmp_path / "x.txt"))


def test_llm_c_files_of_gpt2(tmp_path: Path) -> None:
    tokens = TrainTokens.open(bin_file(tmp_path / "x.bin", [50256, 0, 65535, 7]))
    assert len(tokens) == 4
    assert tokens.read(0, 4) == [50256, 0, 65535, 7]
    assert tokens.read(2, 1) == [65535]


def test_llm_c_files_of_llama_3(tmp_path: Path) -> None:
    file = bin_file(tmp_path / "x.bin", [128000, 5, 70000], magic=20240801, version=7)
    assert TrainTokens.open(file).read(0, 3) == [128000, 5, 70000]


def test_text_is_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes("aé\0".encode())
    assert TrainTokens.open(str(tmp_path / "x.txt")).read(0, 4) == [97, 0xC3, 0xA9, 0]


def test_sources_are_joined_by_name_up_to_a_size(tmp_path: Path) -> None:
    for name, content in [("b.py", "22"), ("a.py", "111"), ("c.txt", "no"), ("d.py", "3333")]:
        (tmp_path / name).write_text(content)
    (tmp_path / "e.py").mkdir()
    tokens = TrainTokens.open(str(tmp_path), most_bytes=7)
    assert bytes(tokens.read(0, len(tokens))) == b"1112233"
    assert len(TrainTokens.open(str(tmp_path))) == 9


def test_pythons_own_sources_are_enough_to_train_on() -> None:
    tokens = TrainTokens.open(sysconfig.get_path("stdlib"), most_bytes=2**20)
    assert len(tokens) == 2**20


def test_a_folder_without_sources(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no Python sources in it."):
        TrainTokens.open(str(tmp_path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gone.bin cannot be read: No such file or directory."):
        TrainTokens.open(str(tmp_path / "gone.bin"))


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"magic": 7}, "is no token file of llm.c: it begins with 7 where 20240520"),
        ({"version": 2}, "is a token file of llm.c of version 2, and only 1 can be read"),
        ({"count": 4}, "is damaged: its header says 4 tokens, and 3 are there"),
        ({"count": 2}, "is damaged: its header says 2 tokens, and 3 are there"),
    ],
)
def test_a_wrong_bin(tmp_path: Path, wrong: dict[str, int], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        TrainTokens.open(bin_file(tmp_path / "x.bin", [1, 2, 3], **wrong))


def test_a_bin_shorter_than_its_header(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"abc")
    with pytest.raises(InputError, match="it has 3 bytes, and the header takes 1024"):
        TrainTokens.open(str(tmp_path / "x.bin"))


def test_a_split_is_the_end_and_all_before_it(tmp_path: Path) -> None:
    train, validation = text_of(tmp_path, 100).split(0.1)
    assert train.read(0, len(train)) == list(range(90))
    assert validation.read(0, len(validation)) == list(range(90, 100))
    with pytest.raises(InputError, match="between 0 and 1, not 1"):
        train.split(1.0)


def test_targets_are_the_tokens_that_follow(tmp_path: Path) -> None:
    batches = TrainBatches(text_of(tmp_path, 200), rows=3, length=16)
    tokens, targets = batches.next()
    assert tokens.shape == targets.shape == (3, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, tokens + 1)  # the text counts up


def test_an_epoch_has_every_window_once_and_the_next_in_another_order(tmp_path: Path) -> None:
    batches = TrainBatches(text_of(tmp_path, 250), rows=1, length=8)
    assert batches.windows == 31
    epochs = [[batches.next()[0][0, 0].item() for _ in range(31)] for _ in range(2)]
    assert all(Counter(epoch) == Counter(range(0, 248, 8)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])


def test_a_position_is_all_that_a_resumed_run_needs(tmp_path: Path) -> None:
    tokens = text_of(tmp_path)
    unbroken = TrainBatches(tokens, rows=4, length=16, seed=5)
    expected = [unbroken.next() for _ in range(40)]
    resumed = TrainBatches(tokens, rows=4, length=16, seed=5)
    resumed.seek(23)
    for number in range(23, 40):
        assert resumed.position == number
        for actual, wanted in zip(resumed.next(), expected[number], strict=True):
            assert torch.equal(actual, wanted)


def test_another_seed_gives_another_order(tmp_path: Path) -> None:
    tokens = text_of(tmp_path)
    one, other = (TrainBatches(tokens, rows=8, length=16, seed=seed) for seed in (1, 2))
    assert not torch.equal(one.next()[0], other.next()[0])


def test_ranks_see_together_what_one_sees_alone(tmp_path: Path) -> None:
    tokens = text_of(tmp_path)
    alone = TrainBatches(tokens, rows=6, length=16)
    ranks = [TrainBatches(tokens, rows=2, length=16, rank=rank, ranks=3) for rank in range(3)]
    for _ in range(20):
        together = torch.cat([rank.next()[0] for rank in ranks])
        assert torch.equal(together, alone.next()[0])


def test_a_text_of_3_bytes(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("abc")
    with pytest.raises(InputError) as refused:
        TrainBatches(TrainTokens.open(str(tmp_path / "x.txt")), rows=1, length=64)
    assert str(refused.value) == (
        f"{tmp_path}/x.txt is too short: a sequence of 64 needs at least 65 tokens, and it has 3."
    )


def test_the_shortest_text_there_may_be(tmp_path: Path) -> None:
    batches = TrainBatches(text_of(tmp_path, 65), rows=2, length=64)
    assert torch.equal(batches.next()[0], torch.arange(64).expand(2, 64))


def test_a_token_beyond_the_vocabulary(tmp_path: Path) -> None:
    tokens = TrainTokens.open(bin_file(tmp_path / "x.bin", [0, 1, 2, 50257, 3]))
    TrainBatches(tokens, rows=1, length=4, vocab=50258).next()
    with pytest.raises(InputError, match="has the token 50257 at place 3, .*vocabulary has 50257"):
        TrainBatches(tokens, rows=1, length=4, vocab=50257).next()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"rows": 0}, "a batch has 1 row of 1 token or more, not 0 of 8"),
        ({"length": 0}, "not 1 of 0"),
        ({"rank": 2, "ranks": 2}, "no data-parallel rank 2 of 2"),
    ],
)
def test_options_without_meaning(tmp_path: Path, options: dict[str, int], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        TrainBatches(text_of(tmp_path), **({"rows": 1, "length": 8} | options))
