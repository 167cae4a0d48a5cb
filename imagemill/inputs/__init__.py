"""Folders of approved images: which entries are images and captions, and what the caption files contain.

    listing ──Entry──> scan, matching ──Scan──> sidecars ──captions, problems──> survey ──> ledger

    archives ──Target──> unpacking ──files──> the folder                                              (imagemill import)

Images are opened in pipeline/stage2/embed.py; staleness is decided in pipeline/stage2/plan.py.
"""
