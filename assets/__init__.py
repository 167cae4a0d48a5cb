"""What exists, one asset each: context in, one call into the subject, a value and counts out."""

import warnings

import dagster as dg

# `backfill_policy` is marked beta in the release we pin; saying so at every command helps nobody.
warnings.filterwarnings("ignore", category=dg.BetaWarning, message="Parameter `backfill_policy`")
