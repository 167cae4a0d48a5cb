"""List a folder once, as a function and as a program: `python -I -S stat_folder.py FOLDER SUFFIX` writes columns to stdout.

It imports next to nothing, so that an interpreter that does nothing else starts in a hundredth of a second (listing.py).
"""

import errno
import os
import stat

# Names without their suffix, and file signatures as `imagemill.files.posix_signature` spells them.
Columns = tuple[list[str], list[str]]


def stat_folder(folder: str | os.PathLike[str], suffix: str) -> Columns:
    """Return the regular files (links to them too) in order of name, or empty columns if there is no such folder."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return [], []
    names: list[str] = []
    signatures: list[str] = []
    look, regular, cut = os.stat, stat.S_ISREG, -len(suffix)
    try:
        for name in sorted([name[:cut] for name in os.listdir(handle) if name.endswith(suffix)]):
            try:
                status = look(name + suffix, dir_fd=handle)  # relative to the folder: one name is resolved, not a path
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ELOOP):  # removed since the folder was read; a link to itself
                    continue
                raise
            if regular(status.st_mode):
                names.append(name)
                signatures.append(f"posix:{status.st_size}:{status.st_mtime_ns}:{status.st_ino}")
        return names, signatures
    finally:
        os.close(handle)


def as_text(columns: Columns) -> list[str]:
    """Return each column as one text with a slash after each value; no file name contains one (columns.py)."""
    return ["/".join([*column, ""]) for column in columns]


if __name__ == "__main__":
    import gc
    import sys

    gc.disable()
    listed = "\0".join(as_text(stat_folder(sys.argv[1], sys.argv[2])))
    sys.stdout.buffer.write(os.fsencode(listed))
    sys.stdout.buffer.flush()
    os._exit(0)  # skips the destruction of a quarter of a million objects
