"""IO managers: Dagster's context converted to paths and events, without byte logic."""
