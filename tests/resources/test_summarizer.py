"""Choice of the summarizer of a deployment, and its identity in finished summaries. Spec: docs/spec/stage-a.md#work"""

import pickle
import shutil
import subprocess
import sys
from contextlib import ExitStack

import pytest
from PIL import Image

from imagemill.encoders import loading, vlm
from imagemill.encoders.preview import ensure_preview
from imagemill.errors import MissingInput, ModelUnusable, WrongUsage
from imagemill.models import NamedImage
from imagemill.pipeline.session import open_session
from imagemill.store.provenance import ModelIdentity
from imagemill.store.trust import NotTrusted, record_consent
from resources.data_root import DataRootResource
from resources.summarizer import PREVIEW_NOTE, SummarizerResource
from tests.helpers.product import PROJECT

MISSION, OTHER = "挡风板安装检查", "别的任务"


@pytest.fixture
def resource(data_root, preview_root):
    """Return the resource for the text of imagemill.yaml; the preview model is shared by the session."""
    data_root.preview_models.parent.mkdir(parents=True, exist_ok=True)
    data_root.preview_models.symlink_to(preview_root)

    with ExitStack() as session:

        def make(text="{}", **fields):
            session.close()
            data_root.config_file.write_text(text, "utf-8")
            session.enter_context(open_session(data_root.path))
            return SummarizerResource(data_root=DataRootResource(path=str(data_root.path)), **fields)

        yield make


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a user's module to a folder on PYTHONPATH that is not the current folder."""
    (tmp_path / "mine_summarizer.py").write_text(
        "class Mine:\n    identity = 'v1'\n"
        "    def summarize(self, images, mission):\n        return [f'{mission} {i.name}' for i in images]\n"
        "class Mute:\n    pass\n"
        "class Needy(Mine):\n    def __init__(self, path):\n        pass\n"
        "class Narrow:\n    def summarize(self, images):\n        return []\n"
        "class Static:\n    @staticmethod\n    def summarize(images, mission):\n        return []\n"
        "class Broken(Mine):\n    def __init__(self):\n        raise OSError('no licence')\n"
    )
    (tmp_path / "no_python.py").write_text("class (\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "mine_summarizer"
    sys.modules.pop("mine_summarizer", None)


# ---- the model


def test_configured_model_answers_after_pickling(resource):
    """The factory is picklable, and ranks of one process share the model."""
    factory = pickle.loads(pickle.dumps(resource().factory()))
    images = [NamedImage(f"{index}.jpg", Image.effect_noise((40, 40), 90).convert("RGB")) for index in range(3)]

    one, two = factory(0), factory(0)

    answers = one.summarize(images, MISSION)
    assert len(answers) == 3
    assert all(answers)
    assert one._model is two._model


def test_factory_of_the_model_imports_neither_torch_nor_dagster_in_a_worker(resource):
    """A worker loads no model if every summary is finished."""
    data = pickle.dumps(resource().factory())
    code = "import pickle, sys; pickle.loads(sys.stdin.buffer.read()); print({'torch', 'dagster'} & set(sys.modules))"

    done = subprocess.run([sys.executable, "-c", code], input=data, cwd=PROJECT, capture_output=True, check=True)

    assert done.stdout == b"set()\n"


def test_identity_is_equal_for_equal_settings_and_names_the_preview_model(resource):
    first, second = resource(), resource("threads: 3\nsummarizer: {batch_size: 2}")

    assert first.identity(MISSION) == second.identity(MISSION)
    assert first.made_by(MISSION).preview


@pytest.mark.parametrize(
    "text",
    ["summarizer: {max_new_tokens: 9}", "summarizer: {temperature: 0.7}", "summarizer: {dtype: bfloat16}",
     "summarizer: {prompts: {挡风板安装检查: ask.txt}}", "summarizer: {prompts: {default: ask.txt}}"],
)  # fmt: skip
def test_setting_or_prompt_changes_the_identity(resource, data_root, text):
    """Lines are reused if model or class, prompt and settings are the same. Spec: docs/spec/stage-a.md#reuse-of-summaries"""
    (data_root.path / "ask.txt").write_text("问", "utf-8")
    before = resource().identity(MISSION)

    assert before != resource(text).identity(MISSION)


def test_model_changes_the_identity(resource, preview_root, tmp_path):
    folder = shutil.copytree(ensure_preview(vlm.SUMMARIZER, preview_root), tmp_path / "model")
    same = resource(f"summarizer: {{model: '{folder}'}}").identity(MISSION)
    (folder / "chat_template.jinja").write_text("{{ messages }}")

    other = resource(f"summarizer: {{model: '{folder}'}}").identity(MISSION)

    assert resource().identity(MISSION) == same != other


def test_prompt_of_one_mission_does_not_affect_the_others(resource, data_root):
    (data_root.path / "ask.txt").write_text("问", "utf-8")
    before, after = resource(), f"summarizer: {{prompts: {{{MISSION}: ask.txt}}}}"
    kept, changed = before.identity(OTHER), before.identity(MISSION)

    assert kept == resource(after).identity(OTHER)
    assert changed != resource(after).identity(MISSION)


def test_edited_prompt_file_changes_the_identity(resource, data_root):
    asking = resource("summarizer: {prompts: {default: ask.txt}}")
    (data_root.path / "ask.txt").write_text("问", "utf-8")
    before = asking.identity(MISSION)
    (data_root.path / "ask.txt").write_text("问吧", "utf-8")

    assert before != asking.identity(MISSION)


def test_missing_model_is_an_error(resource):
    """A template answer is never used instead."""
    absent = resource("summarizer: {model: /nowhere/at-all}")

    with pytest.raises(ModelUnusable, match="/nowhere/at-all cannot be used"):
        absent.identity(MISSION)
    with pytest.raises(ModelUnusable, match="/nowhere/at-all cannot be used"):
        absent.factory()(0)


def test_missing_prompt_file_is_reported_before_a_worker_starts(resource):
    with pytest.raises(MissingInput, match="prompt file cannot be read"):
        resource("summarizer: {prompts: {default: absent.txt}}").factory()


def test_run_configuration_overrides_the_file(resource):
    settings = resource("summarizer: {batch_size: 2, max_new_tokens: 9}", overrides={"max_new_tokens": 4}).settings()

    assert (settings.batch_size, settings.max_new_tokens) == (2, 4)


@pytest.mark.parametrize("overrides", [{"modle": "x"}, {"batch_size": 0}, {"kind": "vllm"}])
def test_invalid_override_is_refused_and_named(resource, overrides):
    with pytest.raises(WrongUsage, match=next(iter(overrides)) if "kind" not in overrides else "vllm") as caught:
        resource(overrides=overrides).settings()

    assert "run configuration" in caught.value.where


@pytest.mark.parametrize(("processes", "threads"), [(1, 5), (2, 2), (5, 1), (9, 1)])
def test_ranks_of_one_machine_share_its_threads_with_the_same_identity(resource, monkeypatch, processes, threads):
    """Each process loads its own model; the number of threads is not part of its identity."""
    monkeypatch.setattr(vlm, "held", lambda settings, spec, threads, preview_root: threads)
    expected = resource().identity(MISSION)
    shared = resource("threads: 5")

    assert shared.factory(processes)(0)._model == threads
    assert shared.identity(MISSION) == expected


def test_model_is_described_as_configured_with_its_preview_flag(resource, preview_root, tmp_path):
    folder = shutil.copytree(ensure_preview(vlm.SUMMARIZER, preview_root), tmp_path / "model")
    settings = f"summarizer: {{model: '{folder}'}}"
    key = resource().made_by(MISSION).key

    assert resource().metadata(MISSION) == {"summarizer": "preview", "key": key, "preview": PREVIEW_NOTE}
    assert resource(settings).metadata(MISSION) == {"summarizer": str(folder), "key": key, "preview": PREVIEW_NOTE}
    (folder / "PREVIEW.json").unlink()
    assert resource(settings).metadata(MISSION) == {"summarizer": str(folder), "key": key}


def test_model_description_has_the_revision_if_there_is_one(resource, monkeypatch):
    made_by = ModelIdentity(kind="vision_language", model="Qwen/Qwen3-VL-4B-Instruct", revision="89644892", facts={})
    monkeypatch.setattr(SummarizerResource, "made_by", lambda self, mission: made_by)

    assert resource().metadata(MISSION) == {
        "summarizer": "Qwen/Qwen3-VL-4B-Instruct", "revision": "89644892", "key": made_by.key,
    }  # fmt: skip


# ---- a class


@pytest.mark.parametrize("how", ["file", "run"])
def test_custom_class_replaces_the_model(resource, module, how):
    named = f"{module}:Mine"
    mine = resource(f"summarizer: {{kind: '{named}'}}") if how == "file" else resource(kind=named)
    if how == "file":
        with pytest.raises(NotTrusted, match=named):
            mine.factory()
        assert "mine_summarizer" not in sys.modules, "nothing of the module was executed"
        record_consent([mine.data_root.root().config_file])

    made = pickle.loads(pickle.dumps(mine.factory()))(0)

    assert made.summarize([NamedImage("a.jpg", Image.new("RGB", (1, 1)))], MISSION) == [f"{MISSION} a.jpg"]
    assert mine.identity(MISSION) == f"{named}:v1"
    assert mine.made_by(MISSION) is None
    assert mine.metadata(MISSION) == {"summarizer": f"{named}:v1"}


def test_run_can_select_the_model_again(resource, module):
    assert resource(f"summarizer: {{kind: '{module}:Mine'}}", kind="transformers").made_by(MISSION).preview


def test_module_of_the_current_folder_is_not_found(resource, tmp_path, monkeypatch):
    """Modules in a data root must not be imported."""
    (tmp_path / "planted.py").write_text("class Mine:\n    def summarize(self, images, mission):\n        return []\n")
    monkeypatch.chdir(tmp_path)

    with pytest.raises(WrongUsage, match="No module named 'planted'"):
        resource(kind="planted:Mine").factory()


@pytest.mark.parametrize(
    ("named", "reason"),
    [("nowhere_to_be_found:Mine", "No module named"), ("mine_summarizer:Absent", "Absent"),
     ("mine_summarizer:Mute", "is not a summarizer class"), ("mine_summarizer", "unknown summarizer"),
     ("mine_summarizer:Needy", "Needy.path.: missing a required argument"),
     ("mine_summarizer:Narrow", "Narrow.summarize.self, images.: too many"), ("no_python:Mine", "SyntaxError")],
)  # fmt: skip
def test_unusable_class_is_refused_before_a_worker_starts(resource, module, named, reason):
    for use in (lambda made: made.factory(), lambda made: made.identity(MISSION)):
        with pytest.raises(WrongUsage, match=reason) as caught:
            use(resource(kind=named))
        assert "summarize(images, mission) -> list[str]" in caught.value.do


def test_class_that_cannot_be_constructed_is_named(resource, module):
    """An error raised in its `__init__` would not mention the summarizer."""
    factory = resource(kind=f"{module}:Broken").factory()

    with pytest.raises(ModelUnusable, match="mine_summarizer:Broken cannot be made") as caught:
        factory(0)
    assert caught.value.why == "OSError: no licence"


def test_static_method_is_accepted(resource, module):
    assert resource(kind=f"{module}:Static").factory()(0).summarize([], MISSION) == []


def test_ranks_use_the_devices_in_turn(resource, monkeypatch):
    """A device per rank, of those that exist; the function goes to the processes of the ranks."""
    monkeypatch.setattr(loading, "existing_devices", lambda: ["cuda:0", "cuda:1", "cpu"])
    loaded = []
    monkeypatch.setattr(vlm, "held", lambda settings, *rest: loaded.append(settings.device))

    make = pickle.loads(pickle.dumps(resource("devices: [0, 1]").factory(2)))
    for rank in (0, 1, 2, 5):
        make(rank)
    assert loaded == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]

    resource("devices: [0, 1]\nsummarizer: {device: cpu}").factory()(3)
    assert loaded[-1] == "cpu"
    with pytest.raises(WrongUsage, match="cuda:7"):
        resource("devices: [7]").factory()
