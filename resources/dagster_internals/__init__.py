"""Private names of Dagster that IO managers and assets use. Those of the entry points are in dagster_project/internals/."""
