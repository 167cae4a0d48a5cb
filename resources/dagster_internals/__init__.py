"""Private names of Dagster that IO managers and assets depend on. Those of the entry points: dagster_project/internals/."""
