"""Text: close names, settings, YAML, JSON, and units."""
