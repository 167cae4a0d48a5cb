-- Version 3: signatures as one text, settings in one table, leases that name a lock file.
-- schema.py imports the identities of models afterwards, which earlier releases kept as files.

ALTER TABLE sources RENAME TO sources_2;
CREATE TABLE sources (
    image_id TEXT PRIMARY KEY,
    file_name TEXT NOT NULL,
    signature TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    height INT NOT NULL,
    width INT NOT NULL
) WITHOUT ROWID;
INSERT INTO sources
SELECT
    image_id,
    file_name,
    CASE WHEN size IS NULL THEN NULL ELSE 'posix:' || size || ':' || mtime_ns || ':' || inode END,
    fingerprint,
    height,
    width
FROM sources_2;
DROP TABLE sources_2;
ALTER TABLE captions RENAME TO captions_2;
CREATE TABLE captions (
    image_id TEXT PRIMARY KEY,
    signature TEXT,
    text TEXT NOT NULL,
    origin TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    mask TEXT,
    truncated INT NOT NULL
) WITHOUT ROWID;
INSERT INTO captions
SELECT
    image_id,
    CASE WHEN size IS NULL THEN NULL ELSE 'posix:' || size || ':' || mtime_ns || ':' || inode END,
    text,
    origin,
    fingerprint,
    mask,
    ifnull(truncated, 0)
FROM captions_2;
DROP TABLE captions_2;
ALTER TABLE files RENAME TO files_2;
CREATE TABLE files (
    kind TEXT,
    image_id TEXT,
    signature TEXT,
    source TEXT,
    content TEXT NOT NULL,
    maker TEXT NOT NULL,
    PRIMARY KEY (kind, image_id, signature)
) WITHOUT ROWID;
INSERT INTO files
SELECT
    kind,
    image_id,
    CASE WHEN size IS NULL THEN NULL ELSE 'posix:' || size || ':' || mtime_ns || ':' || inode END,
    source,
    content,
    maker
FROM files_2;
DROP TABLE files_2;
ALTER TABLE problems RENAME TO problems_2;
CREATE TABLE problems (
    item TEXT,
    asset TEXT,
    outcome TEXT NOT NULL,
    reason TEXT NOT NULL,
    detail TEXT NOT NULL,
    remedy TEXT NOT NULL,
    signature TEXT,
    run_id TEXT NOT NULL,
    at TEXT NOT NULL,
    PRIMARY KEY (item, asset)
) WITHOUT ROWID;
INSERT INTO problems
SELECT
    item,
    asset,
    outcome,
    reason,
    detail,
    remedy,
    CASE WHEN size IS NULL THEN NULL ELSE 'posix:' || size || ':' || mtime_ns || ':' || inode END,
    ifnull(run_id, ''),
    at
FROM problems_2;
DROP TABLE problems_2;
CREATE TABLE recorded_captions (image_id TEXT PRIMARY KEY, fingerprint TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO recorded_captions SELECT image_id, fingerprint FROM captions;
CREATE TABLE superseded (
    kind TEXT,
    image_id TEXT,
    signature TEXT,
    source TEXT,
    maker TEXT NOT NULL,
    PRIMARY KEY (kind, image_id, signature)
) WITHOUT ROWID;
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO settings SELECT 'place.' || name, path FROM places;
DROP TABLE places;
INSERT INTO settings SELECT 'regenerating.' || kind, state FROM regenerating;
DROP TABLE regenerating;
INSERT INTO settings SELECT 'begun', '1' WHERE EXISTS (SELECT 1 FROM sources) OR EXISTS (SELECT 1 FROM files);
INSERT INTO settings
SELECT
    'stage1',
    'migrated' WHERE EXISTS (SELECT 1
FROM counts
WHERE asset = 'stage2_jsonl' AND json_extract(counts, '$.migrated') > 0);
DROP TABLE claims;
CREATE TABLE leases (
    asset TEXT,
    item TEXT,
    owner TEXT NOT NULL,
    run_id TEXT NOT NULL,
    boot_id TEXT NOT NULL,
    pid_namespace TEXT NOT NULL,
    host TEXT NOT NULL,
    pid INT NOT NULL,
    PRIMARY KEY (asset, item)
) WITHOUT ROWID;
