"""File formats: writer and reader of each format side by side."""
