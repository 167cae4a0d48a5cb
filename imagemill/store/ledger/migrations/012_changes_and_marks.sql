-- Version 12: when images, captions and files changed, and in which run; solved problems; images that are gone; marks.
-- The times of rows of earlier releases are unknown.

CREATE TABLE runs (run_id INTEGER PRIMARY KEY, run TEXT UNIQUE, began_at INT NOT NULL);
ALTER TABLE sources ADD COLUMN added_at INT;
ALTER TABLE sources ADD COLUMN changed_at INT;
ALTER TABLE sources ADD COLUMN run_id INT;
ALTER TABLE captions ADD COLUMN changed_at INT;
ALTER TABLE captions ADD COLUMN run_id INT;
ALTER TABLE files ADD COLUMN changed_at INT;
ALTER TABLE files ADD COLUMN run_id INT;
CREATE TABLE solved (
    item TEXT,
    asset TEXT,
    reason TEXT,
    outcome TEXT NOT NULL,
    detail TEXT NOT NULL,
    at TEXT NOT NULL,
    solved_at INT NOT NULL,
    PRIMARY KEY (item, asset, reason)
) WITHOUT ROWID;
CREATE TRIGGER problem_solved AFTER DELETE ON problems BEGIN
INSERT OR REPLACE INTO solved
VALUES (old.item, old.asset, old.reason, old.outcome, old.detail, old.at, CAST(strftime('%s', 'now') AS INT)); END;
CREATE TABLE gone (image_id TEXT PRIMARY KEY, at INT NOT NULL) WITHOUT ROWID;
CREATE TABLE marks (image_id TEXT PRIMARY KEY, at TEXT NOT NULL) WITHOUT ROWID;
