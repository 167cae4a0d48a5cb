"""Starts the recorder in a process of the product; on PYTHONPATH only while messages are recorded."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import recorder

del sys.path[0]
recorder.start()
