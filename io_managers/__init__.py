"""Dagster's context turned into paths and events; no byte logic."""
