"""A failure whose text the UI shows without a stack trace."""

from collections.abc import Mapping
from typing import Any

import dagster as dg
from dagster._core.errors import DagsterUserCodeProcessError
from dagster_shared.error import SerializableErrorInfo


class ExplainedFailure(DagsterUserCodeProcessError, dg.Failure):
    """A failure that its text explains: the UI shows the text and the metadata, without a stack trace. It is not retried.

    Dagster stores the error infos of the first base class unchanged, instead of the traceback.
    """

    def __init__(self, text: str, metadata: Mapping[str, Any] | None = None) -> None:
        info = SerializableErrorInfo(f"{text}\n", [], dg.Failure.__name__)
        super().__init__(text, metadata, False, user_code_process_error_infos=[info])
