"""Third of the three files that add an embedding kind: its asset. In the product this is two lines of assets/embeddings.py."""

from assets.embeddings import embedding_asset, embedding_assets
from tests.helpers.toy_kind.spec import TOY

mean_colour = embedding_asset(TOY, "Mean colour of each image, float32 (5,), in `derived/mean_colour/{image_id}.npy`.")
embedding_assets.append(mean_colour)
