"""File system primitives, independent of images."""
