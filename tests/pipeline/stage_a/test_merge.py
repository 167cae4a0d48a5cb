"""From rank files to groups: strict, one group at a time. Spec: docs/spec/stage-a.md#failed-groups"""

import random
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.ranks import plan_ranks
from imagemill.formats.jsonl import encode_line, read_jsonl
from imagemill.pipeline.stage_a import merge as merging
from imagemill.pipeline.stage_a.merge import merge_ranks
from imagemill.pipeline.stage_a.missions import EXTENSIONS, LABEL_FOLDERS
from imagemill.pipeline.stage_a.rank_files import RankLine, RankMark, output_file, rank_file, rank_files, write_mark
from imagemill.validation import stage_a as rules
from imagemill.validation.findings import collect
from imagemill.validation.stage_a import stage_a_records
from tests.helpers.stage_a import MISSION, Bench, Recorder, group, ticket

A, B = group("a", 3), group("b", 1, "fail")


def line(group, seq, index, **fields):
    given = {"group_seq": seq, "group_id": group.group_id, "label": group.label, "image_index": index, "ok": True}
    given |= {"image_name": group.images[index - 1], "fingerprint": "xxh3:0", "summary": f"{group.group_id} {index}"}
    return RankLine(**(given | fields))


def good(groups):
    return [line(g, seq, index) for seq, g in enumerate(groups) for index in range(1, len(g.images) + 1)]


def written(path):
    return {(line.value["group_id"], line.value["label"]): line.value for line in read_jsonl(path)}


@pytest.fixture
def merge(tmp_path):
    """Merge these lines of each rank; return the result and the written groups."""

    def merged(*ranks, groups=(A, B), **options):
        files = {}
        for rank, lines in enumerate(ranks):
            files[rank] = rank_file(tmp_path, "m", rank)
            files[rank].write_bytes(b"".join(each if isinstance(each, bytes) else encode_line(each) for each in lines))
        result = merge_ranks("m", list(groups), files, output_file(tmp_path, "m"), **options)
        merged.path = output_file(tmp_path, "m")
        return result, written(merged.path) if merged.path.exists() else None

    return merged


def failures(result):
    return {
        (failure.group.group_id, image.image_name, image.reason)
        for failure in result.failures
        for image in failure.images
    }


def test_record_has_exactly_the_five_fields_aligned(merge):
    """Spec: docs/spec/stage-a.md#group-records"""
    result, groups = merge(reversed(good([A, B])))

    assert (result.written, result.failures, result.exit_code) == (2, [], 0)
    assert {
        "group_id": "a", "mission": "m", "label": "pass", "images": list(A.images),
        "per_image": {"image_1": "a 1", "image_2": "a 2", "image_3": "a 3"},
    } == groups["a", "pass"]  # fmt: skip
    assert list(groups["a", "pass"]) == ["group_id", "mission", "label", "images", "per_image"]
    assert list(groups["a", "pass"]["per_image"]) == ["image_1", "image_2", "image_3"]
    assert collect("m", "stage-a", stage_a_records(merge.path)).findings == []


def test_missing_image_result_causes_group_failure_only(merge):
    """Scenario: Missing image result causes group failure only."""
    result, groups = merge([line(A, 0, 1), line(A, 0, 2), line(B, 1, 1)])

    assert {("b", "fail")} == groups.keys()
    assert {("a", "a-3.jpg", "missing_line")} == failures(result)
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (line(A, 0, 2), "duplicate_line"),
        (line(A, 0, 2, ok=False, error="late: x"), "duplicate_line"),
        (line(A, 0, 1, group_id="other"), "foreign_line"),
        (line(A, 0, 1, label="fail"), "foreign_line"),
        (line(A, 0, 1, image_name="a-2.jpg"), "foreign_line"),
        (line(A, 0, 1, image_index=4), "foreign_line"),
        (line(A, 0, 3, image_index=0), "foreign_line"),
        (line(A, 0, 2, image_index=-1), "foreign_line"),
    ],
)
def test_extra_line_fails_only_its_group(merge, extra, reason):
    result, groups = merge([*good([A, B])], [extra])

    assert {("b", "fail")} == groups.keys()
    assert {reason} == {why for _, _, why in failures(result)}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"ok": False, "error": "undecodable: cannot: be"}, "undecodable"),
        ({"ok": False}, "failed"),
        ({"summary": " "}, "blank_answer"),
        ({"summary": ""}, "blank_answer"),
        ({"summary": "a\u2028b"}, "blank_answer"),
        ({"summary": "\u200b"}, "blank_answer"),
    ],
)
def test_failed_or_blank_line_fails_only_its_group(merge, fields, reason):
    result, groups = merge([line(A, 0, 1), line(A, 0, 2, **fields), line(A, 0, 3), line(B, 1, 1)])

    assert {("b", "fail")} == groups.keys()
    assert {("a", "a-2.jpg", reason)} == failures(result)


def test_reason_of_a_failed_line_is_reported_in_full(merge):
    result, _ = merge([line(A, 0, index, ok=False, error="undecodable: cannot: be") for index in (1, 2, 3)])

    assert {"cannot: be"} == {image.detail for image in result.failures[0].images}
    assert len(result.failures[0].images) == 3


@pytest.mark.parametrize("junk", [b"\n", b"null\n", b"\xff\xfe\n", b'{"group_seq":0}\n', b'{"group_seq":0,"grou'])
def test_unreadable_line_is_counted_and_fails_no_group(merge, junk):
    result, groups = merge([*good([A, B]), junk])

    assert (len(groups), result.unreadable) == (2, 1)


@pytest.mark.parametrize("seq", [-1, 2, 10**9])
def test_line_of_an_unknown_group_is_counted_and_fails_no_group(merge, seq):
    result, groups = merge([*good([A, B]), line(A, seq, 1)])

    assert (len(groups), result.strays) == (2, 1)


def test_same_id_under_both_labels_is_two_groups(merge):
    twice = [group("a", 2, "fail"), group("a", 2)]

    _, groups = merge(good(twice), groups=twice)

    assert {("a", "fail"), ("a", "pass")} == groups.keys()


def test_previous_output_is_kept_if_no_group_could_be_written(merge):
    """Spec: docs/spec/stage-a.md#exit-codes-of-stage-a"""
    merge(good([A, B]))
    result, groups = merge([])

    assert (result.exit_code, result.kept_previous, result.written, len(result.failures)) == (1, True, 0, 2)
    assert len(groups) == 2


def test_no_output_is_created_if_no_group_could_be_written(merge):
    result, groups = merge([line(A, 0, 1)])

    assert (result.exit_code, groups) == (1, None)
    assert [rank_file(merge.path.parent, "m", 0)] == list(merge.path.parent.iterdir())


def test_mission_without_groups_gives_an_empty_file(merge):
    result, groups = merge(groups=())

    assert (result.exit_code, groups) == (0, {})
    assert merge.path.read_bytes() == b""


def test_output_is_kept_if_every_group_failed_before_the_merge(merge):
    merge(good([A, B]))
    result, groups = merge(groups=(), failed=2)

    assert (result.exit_code, len(groups)) == (1, 2)


def test_failed_group_loses_its_earlier_record(merge):
    merge(good([A, B]))
    _, groups = merge([line(B, 1, 1)])

    assert {("b", "fail")} == groups.keys()


plans = st.tuples(
    st.lists(st.integers(1, 5), min_size=1, max_size=6), st.sampled_from(["per_group", "per_image"]), st.integers(1, 4)
)


@given(plans, st.randoms(use_true_random=False))
def test_groups_do_not_depend_on_world_size_mode_or_order_of_lines(tmp_path_factory, plan, order):
    """Scenario: Same groups, different texts are allowed; Merge order is not a correctness criterion."""
    sizes, mode, world = plan
    folder = tmp_path_factory.mktemp("merge")
    groups = [group(f"g{number}", size, order.choice(["pass", "fail"])) for number, size in enumerate(sizes)]
    files = {}
    for rank in range(world):
        jobs = list(plan_ranks(sizes, mode, world).jobs(rank))
        order.shuffle(jobs)
        files[rank] = rank_file(folder, "m", rank)
        files[rank].write_bytes(b"".join(encode_line(line(groups[seq], seq, index)) for seq, index in jobs))

    result = merge_ranks("m", groups, files, folder / "out")

    assert not result.failures
    expected = folder / "expected"
    rank_file(folder, "one", 0).write_bytes(b"".join(map(encode_line, good(groups))))
    merge_ranks("m", groups, {0: rank_file(folder, "one", 0)}, expected)
    assert expected.read_bytes() == (folder / "out").read_bytes()


@given(plans, st.integers(0, 2**32))
def test_corrupted_lines_never_give_partial_groups_or_misplaced_summaries(tmp_path_factory, plan, seed):
    """Lines are dropped, duplicated, truncated, or foreign. No summary is ever paired with another image."""
    sizes, _, world = plan
    chance, folder = random.Random(seed), tmp_path_factory.mktemp("chaos")
    groups = [group(f"g{number}", size) for number, size in enumerate(sizes)]
    foreign = [group(f"f{number}", size) for number, size in enumerate(reversed(sizes))]
    deeds = {"keep": 12, "drop": 1, "double": 1, "foreign": 1, "fail": 1, "tear": 1}
    touched, ranks = set(), [[] for _ in range(world)]
    for each in good(groups):
        deed = chance.choices(list(deeds), list(deeds.values()))[0]
        whole, into = encode_line(each), chance.choice(ranks)
        other = foreign[each.group_seq % len(foreign)]
        into += {
            "keep": [whole], "drop": [], "double": [whole, whole], "tear": [whole[: len(whole) // 2] + b"\n"],
            "foreign": [whole, encode_line(line(other, each.group_seq, 1))],
            "fail": [encode_line(line(groups[each.group_seq], each.group_seq, each.image_index, ok=False, error="e: e"))],
        }[deed]  # fmt: skip
        if deed != "keep":
            touched.add(each.group_seq)
    files = {rank: rank_file(folder, "m", rank) for rank in range(world)}
    for rank, lines in enumerate(ranks):
        chance.shuffle(lines)
        files[rank].write_bytes(b"".join(lines))

    result = merge_ranks("m", groups, files, folder / "out")

    found = written(folder / "out") if (folder / "out").exists() else {}
    whole = {g.group_id: g for seq, g in enumerate(groups) if seq not in touched}
    assert whole.keys() == {group_id for group_id, _ in found}
    assert {g.group_id for g in groups} - whole.keys() == {failure.group.group_id for failure in result.failures}
    for g in whole.values():
        expected = {f"image_{index}": f"{g.group_id} {index}" for index in range(1, len(g.images) + 1)}
        assert expected == found[g.group_id, "pass"]["per_image"]


def test_validator_and_writer_use_the_same_names():
    assert (set(rules.LABELS), rules.EXTENSIONS) == (set(LABEL_FOLDERS), EXTENSIONS)
    assert output_file(Path(), "m").name == f"m{rules.SUFFIX}"


# ---- clean-up after the ranks


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    for folder in ("a", "b"):
        ticket(bench.input, "pass", folder, "1.jpg", "2.jpg")
    return bench


def test_intermediate_files_are_removed_by_default(bench):
    """Scenario: Default cleanup of intermediate files."""
    _, merged = bench.run(mode="per_image", world_size=2)

    assert merged.removed == 2
    assert [bench.result] == list(bench.output.iterdir())


def test_intermediate_files_are_kept_on_request(bench):
    """Scenario: Keep intermediate files for debugging."""
    bench.run(mode="per_image", world_size=2, keep=True)

    assert list(rank_files(bench.output, MISSION)) == [0, 1]


def test_intermediate_files_stay_after_a_failed_group(bench):
    """Spec: docs/spec/stage-a.md#intermediate-files"""
    _, merged = bench.run(Recorder({"2.jpg": ""}), world_size=2)

    assert merged.exit_code == 1
    assert list(rank_files(bench.output, MISSION)) == [0, 1]


def test_files_of_superfluous_ranks_are_used_and_removed(bench):
    """Their lines for groups outside this run are kept too."""
    bench.infer(bench.plan(world_size=4))
    for path in bench.store.iterdir():
        path.unlink()
    (summarizer,), merged = bench.run(world_size=1, passes=1)
    (later,), _ = bench.run(world_size=1)

    assert (summarizer.asked, merged.written, rank_files(bench.output, MISSION)) == ([], 1, {})
    assert later.asked == []


def test_unfinished_rank_is_named_and_its_finished_lines_are_merged(bench):
    plan = bench.plan(mode="per_image", world_size=2)
    list(bench.rank(plan, 0, Recorder()))
    died = bench.rank(plan, 1, Recorder(), batch_size=1)
    next(died)
    died.close()

    merged = bench.finish(plan)

    assert (merged.missing_ranks, merged.other_plan, merged.written, merged.removed) == ([1], [], 1, 0)
    assert {("b", "2.jpg", "missing_line")} == failures(merged)


def test_lines_of_another_plan_are_never_merged(bench):
    """The image changed but kept its name."""
    bench.infer(bench.plan(world_size=2))
    ticket(bench.input, "pass", "b", "1.jpg")
    plan = bench.plan(world_size=2)
    list(bench.rank(plan, 0, Recorder()))

    merged = bench.finish(plan)

    assert ([1], {("a", "pass")}) == (merged.missing_ranks, written(bench.result).keys())
    assert merged.other_plan == [1]
    assert {("b", "1.jpg", "missing_line"), ("b", "2.jpg", "missing_line")} == failures(merged)


def test_rank_of_an_earlier_start_is_missing(bench):
    plan = bench.plan(world_size=2)
    for rank, launch in enumerate(["now", "before"]):
        list(bench.rank(plan, rank, Recorder(), launch=launch))

    assert bench.finish(plan, launch="now", keep=True).missing_ranks == [1]
    assert bench.finish(plan).missing_ranks == []


def test_emptied_mission_has_an_empty_output_and_no_missing_rank(bench):
    bench.run()
    plan = bench.plan(passes=0)

    merged = bench.finish(plan)

    assert (merged.exit_code, merged.missing_ranks, bench.result.read_bytes()) == (0, [], b"")


def test_lines_of_an_unfinished_rank_of_this_plan_are_merged(bench):
    plan = bench.plan()
    bench.infer(plan)
    write_mark(bench.output, MISSION, 0, RankMark(plan.digest, "", False))

    merged = bench.finish(plan)

    assert (merged.missing_ranks, merged.written, merged.removed) == ([0], 2, 0)
    assert len(list(chain.from_iterable(record["images"] for record in written(bench.result).values()))) == 4


def test_line_that_changes_during_the_merge_fails_its_group(bench, monkeypatch):
    """Lines are indexed first and read again when their group is written."""
    plan = bench.plan(world_size=1)
    bench.infer(plan)
    parse, seen = merging.parse_rank_line, set()

    def parsed(raw):
        line = parse(raw)
        if line and line.image_name == "2.jpg" and raw.strip() in seen:
            return None
        seen.add(raw.strip())
        return line

    monkeypatch.setattr(merging, "parse_rank_line", parsed)

    merged = bench.finish(plan)

    details = {image.detail for failure in merged.failures for image in failure.images}
    assert details == {"its line changed while it was merged"}
