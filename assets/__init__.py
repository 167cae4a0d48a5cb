"""The assets, one module each: context in, one call into imagemill, a value and counts out."""
