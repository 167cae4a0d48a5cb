-- Version 13: of which images rows have changed, in order; what the last merge of the records, and the last packing, has seen of it.

CREATE TABLE row_changes (number INTEGER PRIMARY KEY AUTOINCREMENT, image_id TEXT NOT NULL);
CREATE TABLE merged (
    path TEXT PRIMARY KEY,
    signature TEXT NOT NULL,
    parameters TEXT NOT NULL,
    epoch INT NOT NULL,
    seen INT NOT NULL
) WITHOUT ROWID;
CREATE TABLE packed (
    path TEXT PRIMARY KEY,
    sets TEXT NOT NULL,
    parameters TEXT NOT NULL,
    epoch INT NOT NULL,
    seen INT NOT NULL
) WITHOUT ROWID;
CREATE TRIGGER sources_inserted AFTER INSERT ON sources BEGIN
INSERT INTO row_changes (image_id) VALUES (new.image_id); END;
CREATE TRIGGER sources_updated AFTER UPDATE ON sources BEGIN
INSERT INTO row_changes (image_id) VALUES (new.image_id); END;
CREATE TRIGGER sources_deleted AFTER DELETE ON sources BEGIN
INSERT INTO row_changes (image_id) VALUES (old.image_id); END;
CREATE TRIGGER captions_inserted AFTER INSERT ON captions BEGIN
INSERT INTO row_changes (image_id) VALUES (new.image_id); END;
CREATE TRIGGER captions_updated AFTER UPDATE ON captions BEGIN
INSERT INTO row_changes (image_id) VALUES (new.image_id); END;
CREATE TRIGGER captions_deleted AFTER DELETE ON captions BEGIN
INSERT INTO row_changes (image_id) VALUES (old.image_id); END;
CREATE TRIGGER captioned_inserted AFTER INSERT ON captioned BEGIN
INSERT INTO row_changes (image_id) VALUES (new.image_id); END;
CREATE TRIGGER captioned_updated AFTER UPDATE ON captioned BEGIN
INSERT INTO row_changes (image_id) VALUES (new.image_id); END;
CREATE TRIGGER captioned_deleted AFTER DELETE ON captioned BEGIN
INSERT INTO row_changes (image_id) VALUES (old.image_id); END;
CREATE TRIGGER files_inserted AFTER INSERT ON files BEGIN
INSERT INTO row_changes (image_id) VALUES (new.image_id); END;
CREATE TRIGGER files_updated AFTER UPDATE ON files BEGIN
INSERT INTO row_changes (image_id) VALUES (new.image_id); END;
CREATE TRIGGER files_deleted AFTER DELETE ON files BEGIN
INSERT INTO row_changes (image_id) VALUES (old.image_id); END;
CREATE TRIGGER problems_inserted AFTER INSERT ON problems BEGIN
INSERT INTO row_changes (image_id) VALUES (new.item); END;
CREATE TRIGGER problems_updated AFTER UPDATE ON problems BEGIN
INSERT INTO row_changes (image_id) VALUES (new.item); END;
CREATE TRIGGER problems_deleted AFTER DELETE ON problems BEGIN
INSERT INTO row_changes (image_id) VALUES (old.item); END;
