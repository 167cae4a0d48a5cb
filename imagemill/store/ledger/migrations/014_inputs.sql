-- Version 14: the images of each input, for all kinds and for the images themselves, instead of an index per table.

CREATE TABLE inputs (
    fingerprint TEXT NOT NULL,
    image_id TEXT NOT NULL,
    PRIMARY KEY (fingerprint, image_id)
) WITHOUT ROWID;
INSERT INTO inputs (fingerprint, image_id)
SELECT fingerprint, image_id FROM sources
UNION SELECT source, image_id FROM files WHERE source IS NOT NULL
UNION SELECT source, image_id FROM superseded WHERE source IS NOT NULL;
DROP INDEX files_by_input;
DROP INDEX sources_by_content;
