"""From a public dataset's own files to raw records: one module per family of datasets, named as the adapter is.

    def read(source: Source) -> Iterator[dict]      one record per image, in the order of the annotations

Belongs here: what each family's files say. They are read from the disk; nothing is downloaded.
Belongs elsewhere: what follows from raw records (pipeline/presets/rescale.py).
"""
