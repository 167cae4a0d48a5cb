"""The unified validator's findings, told to Dagster: one file per asset file.

Checks are unpartitioned: with partitions their rows stay PLANNED for ever in range runs. They judge the whole folder.
"""
