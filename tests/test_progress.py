"""Progress of long-running work: one text, on a bar or on plain lines."""

import io
import random
import sys

import pytest

from imagemill import progress


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    return clock


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_first_line_comes_at_once_with_the_amount_of_work(capsys, clock):
    with progress.Progress("vae_latents", 10, work=39_300_000):
        assert lines(capsys) == ["vae_latents: 0 of 10 images (39.3 MP)"]
    with progress.Progress("vae_latents", 30, work=30 * 48 * 32):
        assert lines(capsys) == ["vae_latents: 0 of 30 images (0.046 MP)"]


def test_plain_lines_give_rate_and_time_left(capsys, clock):
    with progress.Progress("vae_latents", 10, work=100_000_000) as bar:
        clock.now += 4
        bar.advance(1, 10_000_000)
        clock.now += 2
        bar.advance(1, 10_000_000)

        assert lines(capsys)[-1] == "vae_latents: 2 of 10 images, 5.0 MP/s, 16 s left"


def test_first_piece_of_work_is_not_part_of_the_rate(capsys, clock):
    """It includes the time to load the model."""
    with progress.Progress("dinov3_npy", 3) as bar:
        clock.now += 1000
        bar.advance()
        assert bar.seconds_left(clock.now) is None
        clock.now += 2
        bar.advance()
        assert bar.seconds_left(clock.now) == pytest.approx(2)


def test_files_that_were_there_already_do_not_change_the_rate(capsys, clock):
    with progress.Progress("vae_latents", 1004) as bar:
        bar.advance(1000, free=True)
        for _ in range(2):
            clock.now += 10
            bar.advance()

        assert bar.seconds_left(clock.now) == pytest.approx(20)


def test_work_without_items_prints_nothing(capsys):
    with progress.Progress("vae_latents", 0):
        pass

    assert lines(capsys) == []


def test_bytes_are_shown_in_megabytes(capsys, clock):
    with progress.Progress("bucket_shards", 2, unit="sample", work=10_000_000, work_unit="B") as bar:
        assert lines(capsys) == ["bucket_shards: 0 B of 10.0 MB"]
        bar.advance(1, 4_000_000)
        clock.now += 10
        bar.advance(1, 4_000_000)

        assert lines(capsys)[-1] == "bucket_shards: 8.0 MB of 10.0 MB, 400.0 kB/s, 5 s left"


def test_last_line_gives_the_whole_time(capsys, clock):
    with progress.Progress("t5_hidden", 2, unit="caption") as bar:
        clock.now += 30
        bar.advance()
        clock.now += 40
        bar.advance()

    assert lines(capsys)[-1] == "t5_hidden: 2 of 2 captions, 1 min 10 s"


@pytest.mark.parametrize("order", ["mixed", "small first", "large first"])
def test_time_left_is_within_a_factor_of_one_and_a_half_from_a_fifth_of_the_work_on(capsys, clock, order):
    """For photos of 1 and of 25 megapixels in any order; the first call loads the model."""
    sizes = [1_000_000] * 60 + [25_000_000] * 20
    if order == "mixed":
        random.Random(3).shuffle(sizes)
    elif order == "large first":
        sizes.reverse()
    costs, estimates = [0.1 + size * 2e-7 for size in sizes], []
    with progress.Progress("vae_latents", len(sizes), work=sum(sizes)) as bar:
        clock.now += 40
        for n, (size, cost) in enumerate(zip(sizes, costs, strict=True)):
            clock.now += cost
            bar.advance(1, size)
            left = sum(costs[n + 1 :])
            if sum(sizes[: n + 1]) >= 0.2 * sum(sizes) and left > 1:
                estimates.append(bar.seconds_left(clock.now) / left)

    assert estimates
    assert 1 / 1.5 < min(estimates) <= max(estimates) < 1.5


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("columns", ["", "0", "40", "200"])
def test_bar_fits_a_terminal_even_of_unknown_width(monkeypatch, columns):
    """Under a pseudo-terminal without a size, the system reports 0 columns."""
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress.Progress("vae_latents", 10, work=39_300_000) as bar:
        bar.advance(5, 20_000_000)

    drawn = [part.strip("\n") for part in terminal.getvalue().split("\r") if part.strip()]
    assert any("vae_latents" in part for part in drawn)
    assert max(map(len, drawn)) <= (int(columns or 0) or 80)


def test_bar_moves_with_every_piece_of_work(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setattr(progress, "MIN_SECONDS", 0.0)
    with progress.Progress("vae_latents", 4) as bar:
        for _ in range(4):
            bar.advance()

    for percent in ("25%", "50%", "75%", "100%"):
        assert percent in terminal.getvalue()
