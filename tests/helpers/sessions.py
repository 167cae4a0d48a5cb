"""Calls that open a session for a single operation."""

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.pipeline import image_report, status
from imagemill.pipeline.session import open_session
from imagemill.validation import contents


def locate(path=None):
    """Return the data root as its next command resolves it."""
    with open_session(path) as session:
        return session.root


def put(root, name, folder):
    """Change a folder of the data root from now on."""
    with open_session(root.path) as session:
        session.put(name, folder)
        return session.root


def read_status(root):
    with open_session(root.path) as session:
        return status.read_status(session)


def explain(root, image_id):
    with open_session(root.path) as session:
        return image_report.explain(session, image_id)


def recorded_contents(root):
    """Return the ledger's rows, read before it is closed."""
    with open_session(root.path) as session:
        found = contents.RecordedContents(session.reading)
        for spec in embedding_specs():
            found._rows_of(spec.kind)
        return found
