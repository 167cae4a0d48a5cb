-- Version 11: the data root's id, by which a history that several roots share knows it.

INSERT OR IGNORE INTO settings VALUES ('root.id', lower(hex(randomblob(16))));
