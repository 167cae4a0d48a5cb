"""The subject itself: images, captions, embeddings, shards. Knows nothing of Dagster."""
