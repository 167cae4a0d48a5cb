"""Private names of Dagster that the entry points use. Those of IO managers and assets are in resources/dagster_internals/."""
