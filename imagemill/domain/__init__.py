"""Rules and values of the domain, independent of files and frameworks."""
