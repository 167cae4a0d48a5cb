"""Configuration turned into live objects, by the names assets ask for them."""
