"""One validator for asset checks, the command line and preflight."""
