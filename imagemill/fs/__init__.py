"""File system primitives; nothing here knows about images."""
