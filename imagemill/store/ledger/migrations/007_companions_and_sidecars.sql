-- Version 7: which files beside an image are masks or captions. Data roots of earlier releases keep their way.

ALTER TABLE captions ADD COLUMN lines INT NOT NULL DEFAULT 0;
ALTER TABLE captions ADD COLUMN conflict INT NOT NULL DEFAULT 0;
INSERT OR IGNORE INTO settings SELECT 'inputs.companions', 'false' WHERE EXISTS (SELECT 1
FROM settings
WHERE name = 'begun');
INSERT OR IGNORE INTO settings SELECT 'captions.sidecars', '{"exact":true,"extensions":["txt"]}' WHERE EXISTS (SELECT 1
FROM settings
WHERE name = 'begun');
