-- Version 6: the colours of images, and how a data root reads its inputs. Data roots of earlier releases keep their way.
-- Files whose format was not known then are opened again.

ALTER TABLE sources ADD COLUMN color TEXT;
ALTER TABLE sources ADD COLUMN profile TEXT NOT NULL DEFAULT '';
ALTER TABLE sources ADD COLUMN first_frame INT NOT NULL DEFAULT 0;
INSERT OR IGNORE INTO settings SELECT 'pixels.color', 'ignore' WHERE EXISTS (SELECT 1
FROM settings
WHERE name = 'begun');
INSERT OR IGNORE INTO settings SELECT 'inputs.formats', '["jpg","jpeg","png","webp"]' WHERE EXISTS (SELECT 1
FROM settings
WHERE name = 'begun');
DELETE FROM problems
WHERE reason = 'undecodable' AND detail LIKE '%not an image in a supported format%';
