"""Asset checks that report the validator's findings: one module per asset module.

Checks are unpartitioned, because with partitions their rows stay PLANNED for ever in range runs. They check the whole folder.
"""
