"""On PYTHONPATH, this folder gives every Python process the stub encoders: those that `imagemill ui` starts too."""

import tests.helpers.stubs  # noqa: F401
