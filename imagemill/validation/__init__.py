"""The validator used by asset checks, the command line and preflight."""
