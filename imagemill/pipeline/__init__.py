"""Processing of images: plan_* functions compute decisions, run_* and write_* functions change files."""
