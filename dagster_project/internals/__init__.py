"""Private names of Dagster, each used in one module here."""
