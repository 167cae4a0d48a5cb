-- Version 8: sub-folders are read. Data roots of earlier releases keep their way.

INSERT OR IGNORE INTO settings SELECT 'inputs.recursive', 'false' WHERE EXISTS (SELECT 1
FROM settings
WHERE name = 'begun');
