-- Version 5: whether a model's caption ended at the most tokens that it may write. Earlier captions count as whole.

ALTER TABLE captioned ADD COLUMN cut_off INT NOT NULL DEFAULT 0;
