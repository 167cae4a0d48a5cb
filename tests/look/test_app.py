"""The viewer's pages over a data root with every kind of problem, through ASGI.

Spec: docs/spec/conventions.md#viewer
"""

import csv
import html
import json
import re
import shutil
import sys
import threading
import time
from urllib.parse import quote, urlencode

import pytest
from PIL import Image
from starlette.testclient import TestClient

from imagemill.domain.filters import FILTERS
from imagemill.domain.inputs import OLD_INPUTS
from imagemill.domain.layout import DataRoot
from imagemill.domain.stage2_records import RECORD_FIELDS
from imagemill.errors import ImagemillError
from imagemill.inputs.sidecars import SIDECARS
from imagemill.look import app, viewer
from imagemill.look.child import Tasks
from imagemill.look.mount import MountedRoot, WithViewers
from imagemill.look.selection import View
from imagemill.look.viewer import Viewer
from imagemill.models import CAPTIONER
from imagemill.pipeline.shards.readiness import ASSET as SHARDS
from imagemill.store.inputs import record_inputs
from imagemill.store.ledger import Ledger, Problem
from imagemill.store.ledger.overview import Overview
from imagemill.web_guard import WebGuard
from tests.helpers.look import number_of, numbers_of_reasons, page, viewing
from tests.helpers.product import PROJECT, command, photos, product, snapshot

HOSTILE = [
    "<script>alert(1)<-script>", "![](http:--evil.example-x.png)", "%2F..%2F", "a#b?c&d=e", "\"quoted' name\"",
    "\u202ertl\u202c", "ü 中",
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = DataRoot(tmp_path_factory.mktemp("look") / "data")
    photos(root.approved, 12)
    for number, name in enumerate(HOSTILE):
        Image.new("RGB", (64 + number, 48), "green").save(root.approved / f"{name}.png")
        (root.approved / f"{name}.txt").write_text(
            f"{name} <img src=x onerror=alert(1)> ![](http://evil.example/x.png)"
        )
    (root.approved / "page.jpg").write_text("<html><script>alert(1)</script></html>")
    (root.approved / "photo0001.txt").unlink()
    (root.approved / "photo0002.txt").write_text("word " * 200)
    (root.approved / "photo0003.txt").write_text("\n")
    (root.approved / "photo0004.png").write_bytes((root.approved / "photo0004.jpg").read_bytes())
    (root.approved / "drawing.psd").write_bytes(b"8BPS")
    (root.approved / "alone.txt").write_text("no image")
    Image.new("RGB", (3000, 30)).save(root.approved / "photo0005.jpg")
    product(root, "run")
    product(root, "withdraw", "photo0006")
    (root.approved / "photo0007.jpg").unlink()
    photos(root.approved / "new", 1)
    return root


@pytest.fixture
def client(root):
    with viewing(root, command=command(stub=True)) as client:
        yield client


def token(client):
    return re.search(r'name="imagemill-token" content="([^"]+)"', page(client, "/"))[1]


def test_each_number_is_that_of_its_filter_and_of_the_command_line(client, root):
    status = json.loads(product(root, "status", "--fresh", "--json"))
    problems = json.loads(product(root, "problems", "--json"))
    text = page(client, "/")
    links = re.findall(r'<a href="images\?([^"]+)">([\d,]+)</a>', text)
    shown = {html.unescape(query): int(count.replace(",", "")) for query, count in links}

    for query, count in shown.items():
        assert number_of(client, query) == count, query
    for name, count in status["filters"].items():
        query = name.partition("=")[0] + "=" + quote(name.partition("=")[2]) if "=" in name else f"show={name}"
        assert shown.get(query, shown.get(f"{query}&crop=1", count)) == count, name
        assert number_of(client, query) == count
    withdrawn = {"photo0006"}
    by_reason = {}
    for problem in problems:
        if problem["item"] not in withdrawn:
            by_reason[problem["reason"]] = by_reason.get(problem["reason"], 0) + 1
    assert {n.removeprefix("reason="): c for n, c in status["filters"].items() if n.startswith("reason=")} == by_reason
    assert {"undecodable", "missing_caption", "id_collision", "source_missing"} <= by_reason.keys()
    assert status["filters"]["withdrawn"] == 1
    assert status["filters"]["seen"] == status["images"]["seen"] - 1
    assert len(FILTERS) <= len(status["filters"])


# Modules that refuse images, captions and records, with the asset under which the ledger has their problems.
_REFUSING = {
    "inputs/sidecars.py": SIDECARS,
    "formats/images.py": "vae_latents",
    "formats/resize.py": "dinov3_npy",
    "encoders/flux_vae.py": "vae_latents",
    "domain/embedding_specs.py": "vae_latents",
    "pipeline/stage2/": "t5_hidden",
    "pipeline/batch_inference.py": CAPTIONER,
    "formats/npy.py": SHARDS,
    "pipeline/shards/": SHARDS,
}


def recorded_problems(items):
    """Yield a problem of each reason code in the table of messages, each of an image of its own."""
    with open(PROJECT / "docs" / "reference" / "messages.csv", newline="") as file:
        rows = [(row["file"].removeprefix("imagemill/"), row["reason"]) for row in csv.DictReader(file)]
    codes = {
        (asset, code.strip())
        for name, reasons in rows
        for part, asset in _REFUSING.items()
        if name.startswith(part)
        for code in reasons.split("|")
        if code and "{" not in code
    }
    codes |= {(SHARDS, f"bad_{name}") for name in RECORD_FIELDS}
    codes -= {(asset, "missing_caption") for asset, _ in codes}  # only of an image without a caption: in the root above
    for item, (asset, code) in zip(items, sorted(codes), strict=False):
        yield Problem(item, asset, "refused", code, "detail", "remedy")


# Reasons that the listing of a data root of this release and of an earlier one finds; `bad_key` is in test_photographs_on_s3.py.
OF_ENTRIES = {
    "bad_id", "id_collision", "caption_collision", "orphan_caption", "unsupported_type", "not_a_file",
    "archive", "bad_metadata", "two_metadata_files",
}  # fmt: skip
OF_OLD_ENTRIES = {"caption_extension", "sub_folder", "metadata_not_read"}
# Reasons of images that were there before, and of lines of the file of records.
OF_CHANGES = {"renamed", "unpaired", "source_missing", "malformed_line", "duplicate_id"}


def unusable_entries(approved):
    """Add entries with each reason of OF_ENTRIES."""
    photo = (approved / "photo0000.jpg").read_bytes()
    for name in ("bell\a.jpg", "twice.jpg", "twice.png", "tie.jpg"):
        (approved / name).write_bytes(photo)
    for name in ("Tie.txt", "TIE.txt", "alone.txt"):
        (approved / name).write_text("a caption")
    for name in ("drawing.psd", "photos.zip"):
        (approved / name).write_bytes(b"8BPS")
    (approved / "lost.jpg").symlink_to("nowhere")
    (approved / "metadata.jsonl").write_text("{")
    (approved / "more").mkdir()
    for name in ("metadata.jsonl", "metadata.csv"):
        (approved / "more" / name).write_text("")


def change(root):
    """Rename one image, replace another by two copies, remove a third, and damage the file of records."""
    names = sorted(root.approved.glob("photo*.jpg"))[-3:]
    names[0].rename(root.approved / "renamed.jpg")
    for copy in ("one.jpg", "other.jpg"):
        shutil.copy(names[1], root.approved / copy)
    for name in names[1:]:
        name.unlink()
    first, *_ = root.stage2_jsonl.read_text().splitlines()
    with open(root.stage2_jsonl, "a") as file:
        file.write(f"{first}\nno record\n")


def test_number_of_each_reason_is_that_of_its_filter_and_of_the_command_line(tmp_path):
    root = DataRoot(tmp_path / "data")
    photos(root.approved, 63)
    product(root, "run")
    unusable_entries(root.approved)
    change(root)
    product(root, "run")
    with Ledger(root.ledger) as ledger:
        recorded = list(recorded_problems([f"photo{number:04d}" for number in range(60)]))
        ledger.record_problems(recorded)
    shutil.rmtree(root.derived)  # the problem of a kind no longer holds once there is a valid file

    reasons = numbers_of_reasons(root)

    assert len(recorded) < 60, "each problem needs an image"
    assert reasons.keys() >= {problem.reason for problem in recorded} | OF_ENTRIES | OF_CHANGES


def test_numbers_of_reasons_of_a_data_root_of_an_earlier_release_agree(tmp_path):
    root = DataRoot(tmp_path / "data")
    photos(root.approved, 2)
    photos(root.approved / "more", 1)
    (root.approved / "photo0000.TXT").write_text("a caption")
    (root.approved / "metadata.jsonl").write_text("{}")
    with Ledger(root.ledger) as ledger:
        record_inputs(ledger, OLD_INPUTS)
    product(root, "run")

    assert numbers_of_reasons(root).keys() >= OF_OLD_ENTRIES


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_and_captions_are_text_and_their_links_open_the_image(client, name):
    text = page(client, f"/images?{urlencode({'text': name[:12]})}")
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    (link,) = set(re.findall(r'href="(image\?id=[^"&]+)', text))
    shown = page(client, f"/{html.unescape(link)}")
    assert f"<bdi>{html.escape(name).replace('&#x27;', '&#39;').replace('&quot;', '&#34;')}</bdi>" in shown
    picture = client.get(f"/{html.unescape(link).replace('image?', 'thumb?')}")
    assert picture.headers["content-type"] == "image/jpeg"


def test_kept_picture_needs_no_other_thread(client, monkeypatch):
    made = {path: client.get(path).content for path in ("/thumb?id=photo0000", "/thumb?id=photo0000&crop=1")}
    monkeypatch.setattr(app, "_jpeg", None)

    assert {path: client.get(path).content for path in made} == made
    assert len(set(made.values())) == 2


def test_page_that_is_named_like_an_image_is_never_sent(client):
    for path in ("/thumb?id=page", "/photo?id=page", "/thumb?id=page&crop=1"):
        answer = client.get(path)
        assert answer.content[:3] == b"\xff\xd8\xff"
        assert b"script" not in answer.content
    assert "undecodable" in page(client, "/image?id=page")


@pytest.mark.parametrize("path", ["/", "/images", "/thumb?id=photo0000", "/photo?id=photo0000", "/static/look.js"])
@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}],
    ids=["host", "origin", "fetch site"],
)
def test_foreign_request_is_refused(client, path, headers):
    assert client.get(path, headers=headers).status_code == 403


def test_every_answer_has_a_policy_that_permits_no_script_of_a_page(client):
    for path in ("/", "/thumb?id=photo0000", "/static/look.js", "/absent"):
        policy = client.get(path).headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy


def test_crawling_all_links_changes_nothing(client, root):
    def state():
        with Ledger(root.ledger, read_only=True) as ledger:
            return ledger.marks(), ledger.withdrawals(), snapshot(root.shards, root.approved)

    before, seen, todo = (
        state(),
        set(),
        ["/", "/task", "/duplicates", "/changes?since=7d", "/images?crop=1&sort=tokens"],
    )
    while todo and len(seen) < 150:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        answer = client.get(path)
        assert answer.status_code == 200, path
        if answer.headers["content-type"].startswith("text/html"):
            links = re.findall(r'(?:href|src)="([^"#]+)"', answer.text)
            todo += [f"/{html.unescape(link).removeprefix('./')}" for link in links]
    assert len(seen) > 60
    assert state() == before


def test_marks_need_the_token_of_the_page_and_are_seen_at_once(client, root):
    given = token(client)
    for wrong in ({}, {"token": "x"}):
        assert client.post("/marks", data={**wrong, "item": "photo0000", "on": "1"}).status_code == 403
    answer = client.post(
        "/marks", data={"token": given, "item": ["photo0000", "photo0008"], "on": "1"},
        headers={"Accept": "application/json", "Origin": "http://127.0.0.1:3100"},
    )  # fmt: skip
    assert answer.json() == {"marked": 2}
    assert number_of(client, "show=marked") == 2
    with Ledger(root.ledger) as ledger:  # another process
        assert list(ledger.marks()) == ["photo0000", "photo0008"]
        ledger.unmark(["photo0008"])
    assert number_of(client, "show=marked") == 1
    assert client.post("/marks", data={"token": given, "item": "absent", "on": "1"}).status_code == 404
    client.post("/marks", data={"token": given, "all": "show=in_shards", "on": "1"})
    assert number_of(client, "show=marked") == number_of(client, "show=in_shards")
    client.post("/marks", data={"token": given, "all": "", "on": "0"})
    assert number_of(client, "show=marked") == 0


def marked_on_the_first_page(client):
    return int(re.search(r'href="images\?show=marked">(\d+)<', page(client, "/"))[1])


def test_numbers_of_the_first_page_are_computed_once_for_each_state(client, root, monkeypatch):
    given, computed, medians = token(client), [], Overview.medians

    def noted(self):
        computed.append(self)
        return medians(self)

    monkeypatch.setattr(Overview, "medians", noted)
    assert (page(client, "/"), computed) == (page(client, "/"), [])

    client.post("/marks", data={"token": given, "item": "photo0000", "on": "1"})
    assert (marked_on_the_first_page(client), len(computed)) == (1, 1)

    with Ledger(root.ledger) as ledger:  # another process
        ledger.unmark(["photo0000"])
    assert (marked_on_the_first_page(client), len(computed)) == (0, 2)


@pytest.mark.parametrize(("seconds", "times"), [(60.0, 1), (-1.0, 2)])
def test_changes_of_a_day_are_counted_again_after_a_while(client, monkeypatch, seconds, times):
    counted, counts_since = [], Overview.counts_since

    def noted(self, *given):
        counted.append(given)
        return counts_since(self, *given)

    monkeypatch.setattr(Overview, "counts_since", noted)
    monkeypatch.setattr(viewer, "_RECENT_SECONDS", seconds)
    page(client, "/")
    before = len(counted)
    page(client, "/")

    assert (before > 0, len(counted) - before) == (True, times - 1)


def test_withdrawal_of_marked_images_runs_the_command_and_can_be_undone(client, root):
    given = token(client)
    client.post("/marks", data={"token": given, "item": ["photo0000", "photo0008"], "on": "1"})
    assert client.post("/withdraw", data={"token": given, "item": "photo0000"}).status_code == 409
    client.post("/withdraw", data={"token": given, "item": ["photo0000", "photo0008"]})
    said = ended(client)
    assert "done" in said
    assert "withdrawn: photo0000, photo0008" in said
    assert number_of(client, "show=withdrawn") == 3
    assert number_of(client, "text=photo0008") == 0
    assert product(root, "verify")

    client.post("/restore", data={"token": given, "item": ["photo0000", "photo0008"]})
    assert "restored: photo0000, photo0008" in ended(client)
    assert number_of(client, "show=withdrawn") == 1


def ended(client):
    until = time.monotonic() + 120
    while "running" in (said := page(client, "/task")) and time.monotonic() < until:
        time.sleep(0.2)
    return html.unescape(said)


def test_read_only_viewer_changes_nothing_and_shows_the_command(root):
    with Ledger(root.ledger) as ledger, viewing(root, read_only=True) as client:
        ledger.mark(["photo0000"])
        assert "imagemill withdraw --marked" in page(client, "/marked")
        assert 'content=""' in page(client, "/")
        assert client.post("/marks", data={"token": "", "item": "photo0000", "on": "0"}).status_code == 403
        assert list(ledger.marks()) == ["photo0000"]
        ledger.unmark(["photo0000"])


def test_every_page_while_another_process_writes(root, client, tmp_path):
    """The ledger changes between any two looks at it, as during a run."""
    ended = threading.Event()

    def write():
        with Ledger(root.ledger) as ledger:
            while not ended.wait(0.001):
                ledger.mark(["photo0008"])
                ledger.unmark(["photo0008"])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for path in (
            "/",
            "/images?changed=added&since=9h",
            "/image?id=photo0009",
            "/duplicates",
            "/marked",
            "/changes",
            "/thumb?id=photo0009",
        ):
            assert client.get(path).status_code in (200, 404), path
        viewer = Viewer(root.path)
        assert viewer.run(viewer.export, tmp_path / "page.html", View())[0] > 10
        viewer.close()
    finally:
        ended.set()
        writer.join()


def test_url_token_is_exchanged_for_a_cookie(root):
    with viewing(root, url_token="secret") as client:
        assert client.get("/").status_code == 403
        assert client.get("/thumb?id=photo0000").status_code == 403
        assert client.get("/?token=other").status_code == 403
        assert client.post("/marks", data={"token": "secret"}).status_code == 403
        answer = client.get("/images?token=secret&text=a", follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/images?text=a")
        assert "httponly" in answer.headers["set-cookie"].lower()
        assert client.get("/").status_code == 200


def test_viewers_in_front_of_another_application(root):
    async def other(scope, receive, send):
        if scope["type"] == "lifespan":
            for step in ("startup", "shutdown"):
                assert (await receive())["type"] == f"lifespan.{step}"
                await send({"type": f"lifespan.{step}.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"Dagster"})

    roots = [MountedRoot(str(root.path)), MountedRoot(str(root.path), "animals")]
    with TestClient(WebGuard(WithViewers(other, roots)), base_url="http://127.0.0.1:3000") as client:
        assert client.get("/").text == "Dagster"
        assert client.get("/imagemillion").text == "Dagster"
        for prefix in ("/imagemill/", "/imagemill/animals/"):
            assert "images in approved/" in page(client, prefix)
            assert client.get(prefix.rstrip("/"), follow_redirects=False).headers["location"].endswith(prefix)
            assert client.get(f"{prefix}thumb?id=photo0000").headers["content-type"] == "image/jpeg"
        assert (
            client.get("/imagemill/thumb?id=photo0000", headers={"Origin": "https://evil.example"}).status_code == 403
        )


@pytest.mark.parametrize(
    "query", ["show=absent", "sort=absent", "page=x", "changed=absent", "least_tokens=-1", "since=x&changed=added"]
)
def test_query_that_means_nothing_is_refused_with_the_choices(client, query):
    answer = client.get(f"/images?{query}")
    assert answer.status_code == 400
    assert "Do:" in answer.text


def test_page_after_the_last_one_is_the_last(client):
    answer = client.get("/images?show=in_shards&page=999999999", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "images?show=in_shards")
    assert client.get("/images?text=absent&page=2").status_code == 200


def test_text_that_is_too_long_to_search_is_refused(client):
    assert client.get("/images", params={"text": "%" * 1000}).status_code == 200
    answer = client.get("/images", params={"text": "%" * 10_000})
    assert answer.status_code == 400
    assert "text has 10,000 characters" in answer.text


def test_only_images_have_a_button_to_mark_them(client):
    """A file that was never decoded cannot be withdrawn, so it cannot be marked."""
    for item, buttons in (("page", 0), ("photo0000", 1), ("photo0007", 1)):
        (grid,) = re.findall(
            rf'<li class="card[^>]*data-item="{item}".*?</li>', page(client, f"/images?text={item}"), re.S
        )
        assert grid.count('class="mark"') == buttons
        assert page(client, f"/image?id={item}").partition("</article>")[0].count('class="mark"') == buttons


def test_many_marked_images_are_withdrawn_together_and_the_first_are_shown(root, monkeypatch):
    monkeypatch.setattr("imagemill.look.app.PAGE_SIZE", 2)
    with viewing(root) as client:
        with Ledger(root.ledger) as ledger:
            ledger.mark(["photo0000", "photo0008", "photo0009"])
            text = page(client, "/marked")
            ledger.unmark(ledger.marks())
        assert text.count('<li class="card') == 2
        assert text.count('name="item"') == 3
        assert '<a href="images?show=marked">all 3</a>' in text


def test_photograph_that_was_removed_a_moment_ago_has_a_page_without_a_picture(client, root):
    assert "thumb?id=photo0009" in page(client, "/images?text=photo0009")
    file, away = root.approved / "photo0009.jpg", root.path / "away.jpg"
    file.rename(away)
    try:
        assert client.get("/thumb?id=photo0009").status_code == 404
        assert "no picture" in page(client, "/images?text=photo0009")
        assert "photo?id=photo0009" not in page(client, "/image?id=photo0009")
    finally:
        away.rename(file)
    assert client.get("/thumb?id=photo0009").status_code == 200


def test_pages_are_back_when_a_state_that_cannot_be_read_is_repaired(client, root):
    """The earlier state is closed before the next one is read, also if that fails."""
    before = page(client, "/images")
    root.config_file.write_text("shard_size: [")
    try:
        assert client.get("/images").status_code >= 400
    finally:
        root.config_file.unlink()
    assert page(client, "/images") == before


def test_image_leads_back_to_the_page_of_the_grid_that_shows_it(client):
    text = page(client, "/image?id=photo0009&show=in_shards")
    position = int(re.search(r"in shards, number (\d+)", text)[1])
    assert f'href="images?show=in_shards#n{position}"' in text
    assert re.search(rf'id="n{position}" href="image\?id=photo0009&', page(client, "/images?show=in_shards"))


def test_neighbours_are_those_within_the_filter(client):
    text = page(client, "/image?id=photo0008&show=in_shards&sort=id&order=desc")
    assert 'rel="prev" href="image?id=photo0009&amp;show=in_shards&amp;order=desc"' in text
    assert 'rel="next" href="image?id=photo0007&amp;show=in_shards&amp;order=desc"' in text


@pytest.mark.parametrize(
    "path",
    ["/image?id=absent", "/thumb?id=absent", "/photo?id=photo0007", "/latents?id=photo0000&kind=absent", "/static/x"],
)
def test_parts_that_do_not_exist_are_not_found(client, path):
    assert client.get(path).status_code == 404


def test_form_that_is_too_large_is_refused(client):
    body = {"token": token(client), "item": "x" * (9 << 20)}
    assert client.post("/marks", data=body).status_code == 400


def test_one_command_runs_at_a_time(root):
    tasks = Tasks(root.path, [sys.executable, "-c", "import time; time.sleep(3)"])
    tasks.restore(["photo0000"])
    with pytest.raises(ImagemillError, match="is running"):
        tasks.restore(["photo0000"])
