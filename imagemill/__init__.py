"""Images, captions, embeddings and shards: the data and its processing, independent of Dagster."""
