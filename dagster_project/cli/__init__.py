"""The command line: one module per command, each a few lines over the same assets and readers as the UI."""
