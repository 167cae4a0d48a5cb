"""The UI over a data root, driven by real clicks: it shows the state on disk, and starts and terminates runs.

One UI and one data root for all tests of this file; each adds its own images, and they run in the order of the file.
"""

import json

import pytest

from assets.partitions import images as image_partitions
from checks.bucket_shards import shards_valid
from checks.embeddings import embedding_checks
from checks.stage2_jsonl import inputs_accepted, records_valid, table_valid, within_limits
from dagster_project.internals.instance import open_instance
from dagster_project.partitions import register
from dagster_project.sensors import STILL_SECONDS
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.inputs.scan import scan_approved
from imagemill.pipeline.stage2.models_in_use import PREVIEW_TEXT
from imagemill.store.ledger.schema import state_of_files
from io_managers.embedding_results import FILES, INPUTS
from tests.helpers.product import imagemill, photos, snapshot, start
from tests.helpers.ui import CHROMIUM, keep_screenshot, node, open_graph, open_group, wait_until, watched_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="no chromium on the path: apt-get install chromium"),
]

BROKEN = "broken"
MISSING = "photo0003"
KINDS = [spec.kind for spec in embedding_specs()]
CHECKS = [
    key
    for check in (*embedding_checks, records_valid, table_valid, within_limits, inputs_accepted, shards_valid)
    for key in check.check_keys
]
CHECKED_ASSETS = sorted({key.asset_key.to_user_string() for key in CHECKS})
# The daemon checks backfills every 30 s and sensors every 5 s.
DAEMON_SECONDS = 150


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Twelve photographs and a file that is not an image, after the main job."""
    root = DataRoot(tmp_path_factory.mktemp("ui") / "data")
    photos(root.approved, 12)
    (root.approved / f"{BROKEN}.jpg").write_bytes(b"no image")
    (root.approved / f"{BROKEN}.txt").write_text("no image")
    done = imagemill("run", "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


# ---- state on disk and in GraphQL


def files(root, kind):
    folder = next(spec.folder for spec in embedding_specs() if spec.kind == kind)
    return {path.stem for path in (root.derived / folder).glob("*.npy")}


def all_files(root):
    return {kind: files(root, kind) for kind in KINDS}


def opened(root):
    """Return the approved images without the broken one."""
    return scan_approved(root.approved).sources.keys() - {BROKEN}


def partitions(ui, asset):
    """Return the partition counts of an asset, by Dagster's names."""
    query = """query ($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode { partitionStats {
        numPartitions numMaterialized numFailed numMaterializing } } } }"""
    return ui.graphql(query, key={"path": [asset]})["assetNodeOrError"]["partitionStats"]


def checks(ui, asset):
    """Return the status of an asset's checks by name, at its latest materialisation."""
    query = """query ($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode { assetChecksOrError {
        ... on AssetChecks { checks { name executionForLatestMaterialization { status } } } } } } }"""
    found = ui.graphql(query, key={"path": [asset]})["assetNodeOrError"]["assetChecksOrError"]["checks"]
    return {check["name"]: check["executionForLatestMaterialization"]["status"] for check in found}


def stale(ui, wanted):
    """Return the (asset, partition) pairs that are not fresh, with the reason."""
    ask = """n%d: assetNodeOrError(assetKey: {path: [%s]}) { ... on AssetNode {
        staleStatus(partition: %s) staleCauses(partition: %s) { reason } } }"""
    parts = [ask % (n, *map(json.dumps, (asset, key, key))) for n, (asset, key) in enumerate(wanted)]
    answers = ui.graphql("{ " + " ".join(parts) + " }")
    return [
        (name, answer)
        for name, answer in zip(wanted, answers.values(), strict=True)
        if answer["staleStatus"] != "FRESH"
    ]


def newest_runs(ui, count=1):
    query = """query ($n: Int!) { runsOrError(limit: $n) { ... on Runs { results {
        runId status jobName tags { key value } } } } }"""
    return ui.graphql(query, n=count)["runsOrError"]["results"]


def run_status(ui, run_id):
    query = "query ($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"
    return ui.graphql(query, id=run_id)["runOrError"]["status"]


def add_photos(root, folder, prefix, count):
    """Add new photographs with captions to `approved/`; return their ids."""
    photos(folder, count, size=(32, 48))
    for path in sorted(folder.iterdir(), reverse=True):  # captions first, because the sensor may run in between
        path.rename(root.approved / f"{prefix}-{path.name}")
    return {f"{prefix}-photo{n:04d}" for n in range(count)}


# ---- pages


def test_graph_shows_every_asset_with_the_counts_of_graphql(ui, root, watched, tmp_path):
    """There is no console error and no failed request."""
    open_graph(watched.page, ui.url)
    keep_screenshot(watched.page, tmp_path / "graph.png")

    for asset in ("approved_images", *KINDS):
        stats = partitions(ui, asset)
        assert f"{stats['numPartitions']} partitions" in node(watched.page, asset).inner_text()
        assert stats["numPartitions"] == len(opened(root)) + 1
    for asset in CHECKED_ASSETS:
        results = list(checks(ui, asset).values())
        passed = results.count("SUCCEEDED")
        assert f"{passed} / {len(results)} Passed" in node(watched.page, asset).inner_text()
    assert watched.errors() == []


def test_asset_page_shows_the_latest_materialisation_and_its_check(ui, watched, tmp_path):
    watched.page.goto(f"{ui.url}/assets/dinov3_npy")
    watched.page.get_by_text(PREVIEW_TEXT, exact=True).wait_for()
    watched.page.get_by_text("Latest check results").wait_for()
    keep_screenshot(watched.page, tmp_path / "asset.png")

    assert watched.page.get_by_text("Never materialized").count() == 0
    assert watched.errors() == []


@pytest.mark.parametrize("asset", ["approved_images", *KINDS])
def test_partitions_page_says_how_many_images_are_materialised(ui, root, watched, tmp_path, asset):
    """The count equals that of the files on disk and of GraphQL; for the source, that of the opened images."""
    expected = len(opened(root))
    if asset in KINDS:
        assert len(files(root, asset)) == expected

    watched.page.goto(f"{ui.url}/assets/{asset}?view=partitions")
    watched.page.get_by_text(f"Materialized ({expected})").wait_for()
    keep_screenshot(watched.page, tmp_path / f"partitions-{asset}.png")

    assert partitions(ui, asset)["numMaterialized"] == expected
    assert watched.errors() == []


@pytest.mark.parametrize("asset", CHECKED_ASSETS)
def test_checks_page_counts_agree_with_graphql(ui, watched, tmp_path, asset):
    expected = sorted(key.name for key in CHECKS if key.asset_key.to_user_string() == asset)
    results = checks(ui, asset)
    assert sorted(results) == expected

    watched.page.goto(f"{ui.url}/assets/{asset}?view=checks")
    watched.page.get_by_text(f"Checks ({len(expected)})").wait_for()
    succeeded = watched.page.get_by_text("Succeeded", exact=True)
    succeeded.first.wait_for()
    keep_screenshot(watched.page, tmp_path / f"checks-{asset}.png")

    warned = [name for name, status in results.items() if status == "FAILED"]
    assert warned == ([INPUTS] if INPUTS in expected else []), "the broken image is named, and nothing else is wrong"
    assert succeeded.count() == list(results.values()).count("SUCCEEDED") == len(expected) - len(warned)
    assert watched.errors() == []


@pytest.mark.parametrize("asset", [*KINDS, "stage2_jsonl"])
def test_refused_image_is_named_with_reason_and_remedy_after_a_run_of_the_command_line(ui, watched, tmp_path, asset):
    """"""
    watched.page.goto(f"{ui.url}/assets/{asset}?view=checks")
    watched.page.get_by_text(INPUTS, exact=True).first.click()
    row = watched.page.locator("tr", has_text="undecodable: ").last  # the table is itself in a row
    row.wait_for()
    keep_screenshot(watched.page, tmp_path / f"refused-{asset}.png")

    text = row.inner_text()
    assert text.startswith(BROKEN)
    assert "replace the file by a complete image" in text
    assert " UTC" in text
    assert watched.errors() == []


def test_bucket_page_shows_the_figures_and_the_folder_of_that_bucket(ui, root, page, tmp_path):
    """The totals of the run are not shown; an empty bucket has no figures."""
    full, empty = "1216x832", "1024x1024"
    folder = root.shards / f"bucket_{full}"
    size = sum(tar.stat().st_size for tar in folder.glob("*.tar"))

    shown = {}
    for bucket in (full, empty):
        page.goto(f"{ui.url}/assets/bucket_shards?view=partitions&partition={bucket}")
        page.locator("tr", has_text="size (MB)").wait_for()
        keep_screenshot(page, tmp_path / f"bucket-{bucket}.png")
        rows = [row.split("\t") for row in page.locator("tr").all_inner_texts()]
        shown[bucket] = {row[0].strip(): row[1].strip() for row in rows if len(row) > 1}

    assert (shown[full]["samples"], shown[full]["shards"]) == ("12", "1")
    assert float(shown[full]["size (MB)"]) == round(size / 1e6, 3)
    assert shown[full]["path"] == str(folder)
    assert shown[empty]["status"] == "empty"
    assert (shown[empty]["samples"], shown[empty]["shards"], float(shown[empty]["size (MB)"])) == ("0", "0", 0)
    assert "path" not in shown[empty]


def test_nothing_is_called_stale_or_unsynced_after_a_good_run(ui, root, page):
    """Streamed events carry version tags."""
    wanted = [(kind, image_id) for kind in KINDS for image_id in sorted(opened(root))[::4]]
    wanted += [("stage2_jsonl", None), ("bucket_shards", "1216x832"), ("bucket_shards", "704x1344")]
    assert stale(ui, wanted) == []

    open_graph(page, ui.url)
    assert page.get_by_text("Unsynced").count() == 0


# ---- starting and stopping


def stored(root):
    """Return bytes and times of every file that a run writes, and what the history and the ledger know."""
    with open_instance(root) as instance:
        known = [run.run_id for run in instance.get_runs()], instance.get_dynamic_partitions(image_partitions.name)
    return snapshot(root.derived, root.shards), state_of_files(root.ledger), known


def test_preview_of_a_tick_shows_the_requested_run_and_changes_nothing(ui, root, page, tmp_path):
    """The next test makes the missing file."""
    (root.derived / "dinov3" / f"{MISSING}.npy").unlink()
    before = stored(root)
    page.goto(f"{ui.url}/locations/__repository__@imagemill/sensors/new_images")

    page.get_by_role("button", name="Preview tick result").click()
    page.get_by_role("button", name="Continue").click()
    page.get_by_text("Requested runs (1)").wait_for()
    keep_screenshot(page, tmp_path / "tick.png")
    dialog = page.get_by_role("dialog")
    assert "1 run request" in dialog.inner_text()
    assert "embed_images" in dialog.inner_text()
    dialog.get_by_text("Preview", exact=True).click()
    for end in ("start", "end"):
        page.get_by_text(f"asset_partition_range_{end}: {MISSING}").wait_for()
    keep_screenshot(page, tmp_path / "requested.png")
    page.get_by_role("button", name="OK").click()
    page.get_by_role("button", name="Close").click()

    assert stored(root) == before
    assert sensor(ui) == {"status": "STOPPED", "ticks": [], "typeSpecificData": {"lastCursor": None}}


def test_single_partition_is_materialised(ui, root, page, tmp_path):
    """By real clicks in the dialog of one asset; nothing else is made."""
    before = snapshot(root.derived, root.shards)
    newest = newest_runs(ui)[0]["runId"]
    page.goto(f"{ui.url}/assets/dinov3_npy?view=partitions")

    page.get_by_role("button", name="Materialize").first.click()
    page.get_by_text("Select a partition or create one").click()
    page.keyboard.type(MISSING)
    page.get_by_text("Select all (1)").click()
    page.keyboard.press("Escape")
    page.get_by_text("1 partition", exact=True).wait_for()
    keep_screenshot(page, tmp_path / "single.png")
    page.get_by_role("button", name="Launch 1 run").click()
    run = wait_until(
        lambda: next((r for r in newest_runs(ui) if r["runId"] != newest), None), 30, "the run is in the history"
    )
    wait_until(lambda: run_status(ui, run["runId"]) in {"SUCCESS", "FAILURE"}, DAEMON_SECONDS, "the run ends")
    page.goto(f"{ui.url}/runs/{run['runId']}")
    page.get_by_text("Success", exact=True).first.wait_for()
    keep_screenshot(page, tmp_path / "made.png")

    assert run_status(ui, run["runId"]) == "SUCCESS"
    assert {"key": "dagster/partition", "value": MISSING} in run["tags"]
    after = snapshot(root.derived, root.shards)
    assert before.keys() <= after.keys()
    changed = {name for name, found in after.items() if found != before.get(name)}
    assert changed == {str(root.derived / "dinov3" / f"{MISSING}.npy")}
    assert image_status(ui, "dinov3_npy", MISSING) == "MATERIALIZED"


def test_backfill_ends_with_the_broken_image_failed_and_all_others_materialised(ui, root, page, context, tmp_path):
    """The backfill is started by real clicks."""
    add_photos(root, tmp_path / "new", "backfilled", 6)
    with open_instance(root) as instance:
        scan = scan_approved(root.approved)
        assert register(instance, image_partitions, scan.sources) == 6
    expected = len(opened(root))
    with watched_page(context) as other:
        other.page.goto(f"{ui.url}/assets/vae_latents?view=partitions")
        other.page.get_by_text(f"Materialized ({expected - 6})").wait_for()

        open_group(page, ui.url, "stage2")
        page.get_by_role("button", name="Materialize all").click()
        page.get_by_role("button", name="All", exact=True).click()
        keep_screenshot(page, tmp_path / "dialog.png")
        page.get_by_role("button", name="Launch backfill").click()
        backfill = wait_until(lambda: backfills(ui), 30, "the backfill is known")[0]["id"]
        page.goto(f"{ui.url}/runs/b/{backfill}")

        # The page that stayed open updates its counts by itself.
        other.page.get_by_text(f"Materialized ({expected})").wait_for(timeout=1000 * DAEMON_SECONDS)
        other.page.get_by_text("Failed (1)").wait_for()
        keep_screenshot(other.page, tmp_path / "partitions.png")
    ended = wait_until(lambda: [b for b in backfills(ui) if b["endTimestamp"]], DAEMON_SECONDS, "the backfill ends")[0]
    page.reload()
    page.get_by_text("100% completed").first.wait_for()
    keep_screenshot(page, tmp_path / "backfill.png")
    assert page.get_by_text(str(expected), exact=True).count() == len(KINDS)

    assert ended["status"] == "COMPLETED_FAILED"
    counts = {c["assetKey"]["path"][0]: c for c in ended["assetBackfillData"]["assetBackfillStatuses"] if c}
    for kind in KINDS:
        assert files(root, kind) == opened(root)
        assert partitions(ui, kind) == {
            "numPartitions": expected + 1, "numMaterialized": expected, "numFailed": 1, "numMaterializing": 0,
        }  # fmt: skip
        assert counts[kind]["numPartitionsMaterialized"] == expected
        assert counts[kind]["numPartitionsFailed"] == 1
        assert image_status(ui, kind, BROKEN) == "FAILED"


def test_run_of_the_ui_that_met_a_refused_image_shows_its_reason_and_no_stack_trace(ui, page, tmp_path):
    """Continues the backfill above. Its checks are evaluated although their step failed."""
    failed = next(run for run in newest_runs(ui, 10) if run["status"] == "FAILURE")
    page.goto(f"{ui.url}/runs/{failed['runId']}")
    page.get_by_text(f"{BROKEN}: undecodable: ").first.wait_for()
    keep_screenshot(page, tmp_path / "failed-run.png")
    assert page.get_by_text("replace the file by a complete image").count() > 0
    assert page.get_by_text("Stack Trace").count() == 0
    assert page.get_by_text("npy.py").count() == 0

    for kind in KINDS:
        assert checks(ui, kind) == {FILES: "SUCCEEDED", INPUTS: "FAILED"}
    page.goto(f"{ui.url}/assets/vae_latents?view=checks")
    page.get_by_text(INPUTS, exact=True).first.click()
    page.locator("tr", has_text="undecodable: ").last.wait_for()
    keep_screenshot(page, tmp_path / "refused-after-ui.png")


def backfills(ui):
    query = """{ partitionBackfillsOrError(limit: 1) { ... on PartitionBackfills { results { id status endTimestamp
        assetBackfillData { assetBackfillStatuses { ... on AssetPartitionsStatusCounts {
            assetKey { path } numPartitionsMaterialized numPartitionsFailed } } } } } } }"""
    return ui.graphql(query)["partitionBackfillsOrError"]["results"]


def image_status(ui, asset, image_id):
    query = """query ($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
        assetPartitionStatuses { ... on DefaultPartitionStatuses {
            materializedPartitions failedPartitions unmaterializedPartitions } } } } }"""
    found = ui.graphql(query, key={"path": [asset]})["assetNodeOrError"]["assetPartitionStatuses"]
    names = {
        "materializedPartitions": "MATERIALIZED",
        "failedPartitions": "FAILED",
        "unmaterializedPartitions": "MISSING",
    }
    return next(status for name, status in names.items() if image_id in found[name])


def test_run_of_the_command_line_is_terminated_and_reexecuted(ui, root, page, tmp_path):
    """Its work is kept, and the second run makes the rest."""
    new = add_photos(root, tmp_path / "new", "stopped", 40)
    command = start("run", "--data-root", root.path, IMAGEMILL_STUB_SLEEP=1.5)
    wait_until(lambda: any(new & files(root, kind) for kind in KINDS), 60, "the first files are there")
    (run,) = newest_runs(ui)
    assert run["status"] == "STARTED"

    page.goto(f"{ui.url}/runs/{run['runId']}")
    page.get_by_role("button", name="Terminate").click()
    page.get_by_role("button", name="Terminate 1 run").click()
    output, _ = command.communicate(timeout=30)
    page.get_by_text("Canceled", exact=True).first.wait_for()
    keep_screenshot(page, tmp_path / "terminated.png")

    assert command.returncode == 130, output
    assert "to resume" in output
    assert run_status(ui, run["runId"]) == "CANCELED"
    kept = snapshot(root.derived / "dinov3", root.derived / "t5_hidden", root.derived / "vae_latents")
    assert new & {image_id for kind in KINDS for image_id in files(root, kind)}, "finished files are kept"
    assert not all(new <= files(root, kind) for kind in KINDS), "it was stopped before its end"

    page.get_by_role("button", name="Re-execute all").click()
    page.wait_for_url(lambda url: "/runs/" in url and run["runId"] not in url)
    again = page.url.rsplit("/", 1)[1].partition("?")[0]
    wait_until(lambda: run_status(ui, again) in {"SUCCESS", "FAILURE"}, DAEMON_SECONDS, "the second run ends")
    page.get_by_text("Success", exact=True).first.wait_for()
    keep_screenshot(page, tmp_path / "reexecuted.png")

    assert run_status(ui, again) == "SUCCESS"
    assert all(new <= files(root, kind) for kind in KINDS)
    now = snapshot(root.derived / "dinov3", root.derived / "t5_hidden", root.derived / "vae_latents")
    assert {path: now[path] for path in kept} == kept, "what was finished is not made again"


def test_sensor_makes_one_run_of_two_new_files_and_both_become_samples(ui, root, page, tmp_path):
    """Records and shards follow at the next tick. The first tick publishes what the backfill above embedded."""
    new = add_photos(root, tmp_path / "new", "noticed", 2)
    page.goto(f"{ui.url}/locations/__repository__@imagemill/sensors/new_images")
    switch = page.locator("label", has=page.get_by_role("checkbox"))
    switch.wait_for()
    # The sensor uses the latest change of any sort (ctime, including renames), not the photographs' mtimes.
    page.wait_for_timeout(1000 * (STILL_SECONDS + 1))
    switch.click()
    try:
        ticks = wait_until(lambda: finished_ticks(ui, 3), 2 * DAEMON_SECONDS, "three ticks have made runs")
        keep_screenshot(page, tmp_path / "sensor.png")
    finally:
        switch.click()
        wait_until(lambda: sensor(ui)["status"] == "STOPPED", 30, "the sensor is off")

    assert [len(tick["runs"]) for tick in ticks] == [1, 1, 1]
    earlier, embedded, published = (tick["runs"][0] for tick in ticks)
    assert earlier["jobName"] == "publish_shards"
    assert (embedded["jobName"], published["jobName"]) == ("embed_images", "publish_shards")
    for run in (embedded, published):
        wait_until(lambda run=run: run_status(ui, run["runId"]) in {"SUCCESS", "FAILURE"}, 90, "the run ends")
        assert run_status(ui, run["runId"]) == "SUCCESS"
    assert all(new <= files(root, kind) for kind in KINDS)
    assert new <= set(samples(root))


def sensor(ui):
    query = """{ sensorOrError(sensorSelector: {repositoryName: "__repository__", repositoryLocationName: "imagemill",
        sensorName: "new_images"}) { ... on Sensor { sensorState { status ticks(limit: 20) {
            status runs { runId jobName } } typeSpecificData { ... on SensorData { lastCursor } } } } } }"""
    return ui.graphql(query)["sensorOrError"]["sensorState"]


def finished_ticks(ui, count):
    """Wait for this many ticks that launched runs; return them, oldest first."""
    made = [tick for tick in sensor(ui)["ticks"] if tick["status"] == "SUCCESS" and tick["runs"]]
    return made[::-1] if len(made) >= count else None


def samples(root):
    """Return the ids of all samples in the shards, by their index."""
    for index in root.shards.glob("bucket_*/index.jsonl"):
        for line in index.read_bytes().splitlines():
            yield json.loads(line)["image_id"]
