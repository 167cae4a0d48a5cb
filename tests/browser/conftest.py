"""Fixtures of the browser tests. A module has one UI, over the data root of its fixture `root`."""

import pytest

from tests.helpers.ui import browser, running_ui, watched_page


@pytest.fixture(scope="module")
def ui(root):
    with running_ui(root, log=root.path.with_name("ui.log")) as ui:
        yield ui


@pytest.fixture(scope="module")
def context():
    with browser() as context:
        yield context


@pytest.fixture
def watched(context):
    with watched_page(context) as watched:
        yield watched


@pytest.fixture
def page(watched):
    return watched.page
