"""Conversion of a public dataset's own files to raw records: one module per family of datasets, named like its adapter.

    def read(source: Source) -> Iterator[dict]      one record per image, in the order of the annotations

Adapters read the formats of each family from local files; nothing is downloaded. Processing of raw records is in
pipeline/presets/rescale.py.
"""
