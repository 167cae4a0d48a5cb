"""Folders of approved images: which entries are images and captions, and what the captions are.

    listing ──Entry──> scan, matching ──Scan──> sidecars, metadata/, folder_words ──captions──> survey ──> ledger
                                          └───> layouts ──settings that use more──> imagemill scan

    archives ──Target──> unpacking ──files──> the folder                                              (imagemill import)

Images are opened in pipeline/stage2/embed.py; staleness is decided in pipeline/stage2/plan.py.
"""
