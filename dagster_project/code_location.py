"""The code location: its name, as in workspace.yaml, and the module of its definitions. Imports nothing."""

LOCATION = "imagemill"
MODULE = "dagster_project.definitions"
ATTRIBUTE = "defs"
