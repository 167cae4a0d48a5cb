"""What exists, one asset each: context in, one call into the subject, a value and counts out."""
