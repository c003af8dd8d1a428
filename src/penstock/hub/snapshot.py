"""The snapshot of a commit: links to the blobs that were verified.

No request is sent, and no name that a hub gave becomes a path before it is checked.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from penstock.errors import InvalidFileError
from penstock.hub.download_estimate import DownloadEstimate
from penstock.hub.downloaded import INCOMPLETE, repository_folder

__all__ = ["link_snapshot"]


def link_snapshot(plan: DownloadEstimate) -> Path:
    """Link every blob into the snapshot, the weights last; record the commit of the revision; return the snapshot."""
    model = plan.model
    root = repository_folder(model.name)
    folder = root / "snapshots" / model.commit
    for file in plan.files:
        parts = file.name.split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise InvalidFileError(
                f"{model.name}: siblings: expected the name of a file, got {file.name!r:.120}", param="siblings"
            )
        _link(plan.blobs / file.digest, folder.joinpath(*parts))
    if model.name.revision != model.commit:
        ref = root / "refs" / model.name.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        temporary = ref.with_name(f"{ref.name}.{os.getpid()}{INCOMPLETE}")
        temporary.write_text(model.commit)
        temporary.replace(ref)
    return folder


def _link(blob: Path, path: Path) -> None:
    """Make ``path`` the blob: a link as other programs of this cache make it, or a copy where links are not possible.

    It appears complete or not at all.
    """
    if path.exists() and path.samefile(blob):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = blob.with_name(f"{blob.name}.{os.getpid()}.link{INCOMPLETE}")
    temporary.unlink(missing_ok=True)
    try:
        if not _may_link():
            raise OSError
        temporary.symlink_to(os.path.relpath(blob, path.parent))
    except OSError:
        try:
            os.link(blob, temporary)
        except OSError:
            shutil.copyfile(blob, temporary)
    temporary.replace(path)


def _may_link() -> bool:
    from huggingface_hub import constants

    return not getattr(constants, "HF_HUB_DISABLE_SYMLINKS", False)
