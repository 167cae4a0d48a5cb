"""Private names of Dagster that the entry points depend on. Those of IO managers and assets: resources/dagster_internals/."""
