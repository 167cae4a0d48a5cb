"""What is done with images: plan_* decides on values, run_* and write_* touch the disk."""
