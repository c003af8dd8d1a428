import os

def find_files(path):
    """Return a list of the Python files in a directory."""
    result = []
    for name in os.listdir(path):
        if name.endswith(".py"):
