"""The front door: definitions, deployments, sensors, our own runs and the command line. Nothing imports it."""
