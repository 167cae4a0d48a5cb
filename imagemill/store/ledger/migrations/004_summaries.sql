-- Version 4: finished summaries of Stage-A. The files that held them are imported when their mission is next run.

CREATE TABLE summaries (
    fingerprint TEXT,
    summary TEXT NOT NULL,
    mission TEXT,
    image TEXT,
    stat TEXT,
    content TEXT NOT NULL,
    at INT NOT NULL,
    PRIMARY KEY (mission, fingerprint, image)
) WITHOUT ROWID;
