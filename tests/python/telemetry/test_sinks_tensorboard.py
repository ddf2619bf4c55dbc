"""TensorBoard's files, read with TensorBoard's own reader."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from intervals import interval, without
from tenure.telemetry import compat
from tenure.telemetry.figures import Figures
from tenure.telemetry.sinks import TensorBoard, heat_map, plain

pytest.importorskip("tensorboard", reason="the client is not installed")


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0}).Reload()


def write(sink: TensorBoard, *figures: Figures) -> None:
    sink.open()
    for one in figures:
        sink.write(one)


def test_scalars_are_there_before_the_end(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    write(sink, interval(10), interval(20, alerts=("headroom < 5 %",)))
    found = read(tmp_path)
    sink.close()
    named = plain(interval(20))
    assert set(found.Tags()["scalars"]) == set(named)
    events = found.Scalars("memory/device_allocated_bytes")
    assert [event.step for event in events] == [10, 20]
    assert [event.wall_time for event in events] == [interval(10).time, interval(20).time]
    for name, value in named.items():
        expected = 1 if name == "memory/alerts" else np.float32(value)
        assert found.Scalars(name)[-1].value == expected, name
    (text,) = found.Tensors("memory/alerts/text_summary")
    assert text.tensor_proto.string_val == [b"headroom < 5 %"]


def test_the_picture_shows_the_rank_that_is_fullest(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="comes with tensorboard")
    sink = TensorBoard(tmp_path)
    write(sink, interval(10), interval(20, rows={}))
    found = read(tmp_path)
    sink.close()
    (event,) = found.Images("memory/ranks")
    assert event.step == 10
    pixels = np.asarray(image.open(io.BytesIO(event.encoded_image_string)))
    assert pixels.shape == (event.height, event.width, 4)
    np.testing.assert_array_equal(pixels, heat_map.drawn(interval(10)))
    top, thick = 14, 20
    cells = [tuple(pixels[top + rank * thick + 5, 60]) for rank in range(4)]
    assert cells[2] == (253, 231, 37, 255), "rank 2 has the highest, the end of the scale"
    assert all(cell[0] < 100 for rank, cell in enumerate(cells) if rank != 2), cells


def test_other_names_are_written_as_they_are(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path, names=compat.megatron_bridge)
    write(sink, interval(10, rows={}))
    sink.close()
    assert set(read(tmp_path).Tags()["scalars"]) == set(compat.megatron_bridge(interval()))


@pytest.mark.parametrize("ranks", [1, 64, 1025, 4096])
def test_the_picture_has_a_limit(ranks: int) -> None:
    picture = heat_map.drawn(interval(ranks=ranks, stages=1))
    assert picture is not None
    assert picture.shape[0] <= 1100
    assert picture.shape[1] <= 600


def test_the_picture_has_what_ranks_have() -> None:
    whole = heat_map.drawn(interval())
    host = heat_map.drawn(without(interval(), "device"))
    assert whole is not None
    assert host is not None
    assert whole.shape[1] > host.shape[1]
    assert heat_map.drawn(without(interval(), "device", "host")) is None
    one = interval()
    del one.rows[1]["device_allocated_bytes"]
    partly = heat_map.drawn(one)
    assert partly is not None
    assert tuple(partly[14 + 20 + 5, 60]) == (128, 128, 128, 64), "no figure, no colour"
