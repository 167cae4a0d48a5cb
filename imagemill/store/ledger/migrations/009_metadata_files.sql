-- Version 9: captions of metadata files, and several captions of one image. Data roots of earlier releases read no such files.

ALTER TABLE captions ADD COLUMN texts TEXT;
INSERT OR IGNORE INTO settings SELECT 'captions.metadata', 'off' WHERE EXISTS (SELECT 1
FROM settings
WHERE name = 'begun');
