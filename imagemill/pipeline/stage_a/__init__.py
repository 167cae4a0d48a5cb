"""Stage-A: one-line summaries by ranks, merged per group.

Spec: docs/spec/stage-a.md#work
"""
