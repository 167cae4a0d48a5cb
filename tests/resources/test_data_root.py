"""The data root of a deployment: folder of the shards. Spec: docs/spec/conventions.md#locations"""

import pytest

from imagemill.errors import ImagemillError, WrongUsage
from imagemill.pipeline.session import open_session
from resources.data_root import DataRootResource
from tests.helpers.sessions import locate


@pytest.fixture
def resource(data_root):
    with open_session(data_root.path):
        yield DataRootResource(path=str(data_root.path), config_file="", output_base_dir="")


def test_shards_folder_of_a_run_is_remembered(resource, data_root, tmp_path):
    assert resource.shards_folder() == data_root.shards

    assert resource.shards_folder(str(tmp_path / "disk")) == resource.shards_folder() == tmp_path / "disk"


def test_file_as_shards_folder_is_refused_and_not_remembered(resource, data_root, tmp_path):
    """A run of the UI reaches this check without the command line."""
    (tmp_path / "file").touch()

    with pytest.raises(WrongUsage, match="cannot create the folder"):
        resource.shards_folder(str(tmp_path / "file"))

    assert locate(data_root.path).shards == resource.shards_folder() == data_root.shards


@pytest.mark.parametrize("make", ["file", "broken symlink"])
def test_bucket_that_is_not_a_folder_is_refused_before_any_work(resource, data_root, make):
    data_root.shards.mkdir(parents=True)
    place = data_root.shards / "bucket_1024x1024"
    place.touch() if make == "file" else place.symlink_to("nothing")

    with pytest.raises(ImagemillError, match="bucket_1024x1024 is not a folder") as caught:
        resource.shards_folder()

    assert make in caught.value.why
    assert caught.value.do


def test_link_to_a_folder_is_accepted_as_a_bucket(resource, data_root, tmp_path):
    data_root.shards.mkdir(parents=True)
    (data_root.shards / "bucket_1024x1024").symlink_to(tmp_path)

    assert resource.shards_folder() == data_root.shards
