"""The job `resume_missing` by real clicks: launched, terminated, executed again, and after kill -9.

One UI and one data root for all tests of this file; they run in the order of the file.
"""

import random
import time

import pytest

from dagster_project.internals.coordinator import RESUME_JOB
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from resources.dagster_internals.events import PARENT_TAG
from tests.helpers.product import imagemill, photos
from tests.helpers.ui import CHROMIUM, keep_screenshot, wait_until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="no chromium on the path: apt-get install chromium"),
]

BROKEN = "broken"
MOST_SECONDS = 60
# Makes each call of a model slow enough to be stopped.
SLEEP = "1.5"
ENDED = {"SUCCESS", "FAILURE", "CANCELED"}


@pytest.fixture(scope="module")
def pace(tmp_path_factory):
    """A file with the seconds that each call of a model takes."""
    file = tmp_path_factory.mktemp("pace") / "seconds"
    file.write_text("0")
    return file


@pytest.fixture(scope="module", params=[200, pytest.param(2000, marks=pytest.mark.soak)])
def root(tmp_path_factory, pace, request):
    """Photographs after the main job."""
    root = DataRoot(tmp_path_factory.mktemp("resume") / "data")
    photos(root.approved, request.param)
    done = imagemill("run", "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IMAGEMILL_STUB_SLEEP", str(pace))
        yield root


def files(root):
    """Return the images with a file of every kind."""
    return set.intersection(
        *({path.stem for path in (root.derived / s.folder).glob("*.npy")} for s in embedding_specs())
    )


def remove(root, count, seed):
    """Delete every file of scattered images; return their ids."""
    gone = random.Random(seed).sample(sorted(files(root)), count)
    for image_id in gone:
        for spec in embedding_specs():
            (root.derived / spec.folder / f"{image_id}.npy").unlink()
    return set(gone)


def runs(ui, count=20):
    query = """query ($n: Int!) { runsOrError(limit: $n) { ... on Runs { results {
        runId status jobName startTime endTime tags { key value } } } } }"""
    return ui.graphql(query, n=count)["runsOrError"]["results"]


def family(ui, run_id):
    """Return a run and its nested runs, oldest first."""
    found = [run for run in runs(ui) if run["runId"] == run_id or {"key": PARENT_TAG, "value": run_id} in run["tags"]]
    return found[::-1]


def launch(ui, page):
    """Launch the job with one click on its launchpad; return the id of its run."""
    page.goto(f"{ui.url}/locations/__repository__@imagemill/jobs/{RESUME_JOB}/playground")
    page.get_by_role("button", name="Launch Run").click()
    page.wait_for_url(lambda url: "/runs/" in url)
    return page.url.rsplit("/", 1)[1].partition("?")[0]


def wait_for_end(ui, run_id, seconds=180):
    return wait_until(
        lambda: next((run for run in family(ui, run_id)[:1] if run["status"] in ENDED), None), seconds, "the run ends"
    )


def materialized(ui, asset):
    query = """query ($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode { partitionStats {
        numMaterialized } } } }"""
    return ui.graphql(query, key={"path": [asset]})["assetNodeOrError"]["partitionStats"]["numMaterialized"]


def test_one_click_makes_scattered_missing_images_in_three_runs(ui, root, page, tmp_path):
    images = len(files(root))
    scattered = len(remove(root, images // 4, seed=0))
    clicked = time.monotonic()

    run_id = launch(ui, page)
    ended = wait_for_end(ui, run_id)
    seconds = time.monotonic() - clicked
    page.get_by_text("Success", exact=True).first.wait_for()
    keep_screenshot(page, tmp_path / "resumed.png")

    print(f"{scattered} of {images}: {seconds:.1f} s, the run {ended['endTime'] - ended['startTime']:.1f} s")
    assert [run["status"] for run in family(ui, run_id)] == ["SUCCESS"] * 3
    assert seconds <= MOST_SECONDS
    assert len(files(root)) == images
    assert [materialized(ui, spec.kind) for spec in embedding_specs()] == [images] * 3


def test_refused_image_is_named_on_the_page_of_the_run(ui, root, page, tmp_path):
    """Everything else is done, and the nested runs succeed."""
    gone = remove(root, 3, seed=1)
    (root.approved / f"{BROKEN}.jpg").write_bytes(b"no image")
    (root.approved / f"{BROKEN}.txt").write_text("no image")

    run_id = launch(ui, page)
    wait_for_end(ui, run_id)
    page.get_by_text(f"{BROKEN}: undecodable: ").first.wait_for()
    keep_screenshot(page, tmp_path / "refused.png")

    assert [run["status"] for run in family(ui, run_id)] == ["FAILURE", "SUCCESS", "SUCCESS"]
    assert gone <= files(root)
    assert page.get_by_text("Stack Trace").count() == 0
    for path in root.approved.glob(f"{BROKEN}.*"):
        path.unlink()


def test_terminated_run_ends_with_its_nested_run_and_makes_the_rest_when_executed_again(ui, root, page, pace, tmp_path):
    gone = remove(root, 60, seed=2)
    pace.write_text(SLEEP)
    run_id = launch(ui, page)
    wait_until(lambda: gone & files(root), 120, "the first files are there")

    page.get_by_role("button", name="Terminate").click()
    page.get_by_role("button", name="Terminate 1 run").click()
    wait_for_end(ui, run_id, 30)
    page.get_by_text("Canceled", exact=True).first.wait_for()
    keep_screenshot(page, tmp_path / "terminated.png")

    assert [run["status"] for run in family(ui, run_id)] == ["CANCELED", "CANCELED"]
    assert not gone <= files(root), "it was stopped before its end"

    pace.write_text("0")
    page.get_by_role("button", name="Re-execute all").click()
    page.wait_for_url(lambda url: "/runs/" in url and run_id not in url)
    again = page.url.rsplit("/", 1)[1].partition("?")[0]
    wait_for_end(ui, again)

    assert [run["status"] for run in family(ui, again)] == ["SUCCESS"] * 3
    assert gone <= files(root)
