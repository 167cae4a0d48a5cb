"""Long work shows that it moves, also where there is no terminal."""

from imagemill import progress


def test_plain_line_with_rate_and_time_left_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    with progress.Progress("vae_latents", 10) as bar:
        bar.advance(4)

    line = capsys.readouterr().err
    assert line.startswith("vae_latents: 4 of 10, ")
    assert "img/s" in line
    assert "s left" in line


def test_short_work_says_nothing_where_there_is_no_terminal(capsys):
    with progress.Progress("vae_latents", 10) as bar:
        bar.advance(10)

    assert capsys.readouterr().err == ""


def test_bytes_are_told_in_mb(capsys, monkeypatch):
    """Packing is told by what it writes: MB, MB/s and the time left."""
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    with progress.Progress("bucket_shards", 10_000_000, unit="B") as bar:
        bar.advance(4_000_000)

    line = capsys.readouterr().err
    assert line.startswith("bucket_shards: 4 of 10, ")
    assert "MB/s" in line
