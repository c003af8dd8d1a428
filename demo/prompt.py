import os


def find_files(path, suffix=".py"):
    """Return a sorted list of the files in a directory."""
    for name in sorted(os.listdir(path)):
        if name.endswith(suffix):
            yield os.path.join(path, name)


def read_file(path):
    """Return the text of a file."""
