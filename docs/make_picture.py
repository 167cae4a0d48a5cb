"""Takes the README's picture of the asset graph from the running UI: `.venv/bin/python docs/make_picture.py [DATA_ROOT] [PNG]`.

DATA_ROOT (default `data`) is one that `make run` has filled. Needs the dev extra and Debian's chromium.
"""

import sys
from pathlib import Path

from imagemill.domain.layout import DataRoot
from tests.helpers.ui import browser, node, open_graph, running_ui, watched_page

PICTURE = Path(__file__).with_name("images") / "asset-graph.png"
# Pixels around the boxes, so that no border is cut.
MARGIN = 14


def main(root: DataRoot, picture: Path) -> None:
    picture.parent.mkdir(parents=True, exist_ok=True)
    size = {"width": 1800, "height": 1240}
    with running_ui(root, stub=False) as ui, browser(device_scale_factor=1.5, viewport=size) as context:
        with watched_page(context) as watched:
            page = watched.page
            open_graph(page, ui.url)
            for asset in ("approved_images", "dinov3_npy", "vae_latents", "t5_hidden"):
                node(page, asset).get_by_text("filled").wait_for()
            page.wait_for_timeout(1000)  # the graph glides into its place
            boxes = [box.bounding_box() for box in page.locator("svg foreignObject").all()]
            page.screenshot(path=picture, clip=_around(boxes))
    print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")


def _around(boxes: list[dict]) -> dict:
    left, top = min(box["x"] for box in boxes), min(box["y"] for box in boxes)
    right, bottom = max(box["x"] + box["width"] for box in boxes), max(box["y"] + box["height"] for box in boxes)
    return {
        "x": left - MARGIN, "y": top - MARGIN, "width": right - left + 2 * MARGIN, "height": bottom - top + 2 * MARGIN,
    }  # fmt: skip


if __name__ == "__main__":
    given = sys.argv[1:]
    main(DataRoot.resolve(given[0] if given else None), Path(given[1]) if len(given) > 1 else PICTURE)
