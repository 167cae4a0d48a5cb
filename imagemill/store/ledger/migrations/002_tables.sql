-- Version 2: the tables of the first releases. Some ledgers of version 1 and 2 lack tables that came without a version.

CREATE TABLE IF NOT EXISTS sources (
    image_id TEXT PRIMARY KEY,
    file_name TEXT NOT NULL,
    size INT,
    mtime_ns INT,
    inode INT,
    fingerprint TEXT NOT NULL,
    height INT NOT NULL,
    width INT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS captions (
    image_id TEXT PRIMARY KEY,
    size INT,
    mtime_ns INT,
    inode INT,
    text TEXT NOT NULL,
    origin TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    mask TEXT,
    truncated INT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS captioned (
    image_id TEXT PRIMARY KEY,
    image TEXT NOT NULL,
    maker TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS files (
    kind TEXT,
    image_id TEXT,
    size INT,
    mtime_ns INT,
    inode INT,
    source TEXT,
    content TEXT NOT NULL,
    maker TEXT NOT NULL,
    PRIMARY KEY (kind, image_id, size, mtime_ns, inode)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS problems (
    item TEXT,
    asset TEXT,
    outcome TEXT NOT NULL,
    reason TEXT NOT NULL,
    detail TEXT NOT NULL,
    remedy TEXT NOT NULL,
    size INT,
    mtime_ns INT,
    inode INT,
    run_id TEXT,
    at TEXT NOT NULL,
    PRIMARY KEY (item, asset)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counts (
    run_id TEXT,
    asset TEXT,
    counts TEXT NOT NULL,
    PRIMARY KEY (run_id, asset)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS changes (
    item TEXT,
    asset TEXT,
    what TEXT,
    PRIMARY KEY (item, asset, what)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS regenerating (kind TEXT PRIMARY KEY, state TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS withdrawn (image_id TEXT PRIMARY KEY, at TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS claims (
    asset TEXT,
    item TEXT,
    owner TEXT NOT NULL,
    run_id TEXT NOT NULL,
    PRIMARY KEY (asset, item)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS verified (path TEXT PRIMARY KEY, signature TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS places (name TEXT PRIMARY KEY, path TEXT NOT NULL) WITHOUT ROWID;
