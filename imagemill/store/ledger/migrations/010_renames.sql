-- Version 10: renamed images, and indexes for files and images with equal inputs.

CREATE TABLE arrivals (image_id TEXT PRIMARY KEY, at TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE renames (
    former TEXT PRIMARY KEY,
    image_id TEXT NOT NULL,
    at TEXT NOT NULL,
    state TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX files_by_input ON files (kind, source);
CREATE INDEX sources_by_content ON sources (fingerprint);
CREATE INDEX sources_by_signature ON sources (signature);
