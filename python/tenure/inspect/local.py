"""Where recordings are written: in the folder that is asked for, or first on this node.

SQLite's log needs shared memory between processes, which network file systems do not give. There a
recording is written to a local folder and copied when the process ends; one that was killed stays
where it is, and is found there by whoever asks for the folder on the same node.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tenure.inspect.options import Options, make_folder, say

__all__ = ["alone_in", "left_behind", "on_network", "recording_path", "send"]

_NETWORK = {
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "coda",
    "fhgfs",
    "gfs2",
    "glusterfs",
    "gpfs",
    "lustre",
    "ncpfs",
    "nfs",
    "nfs4",
    "ocfs2",
    "orangefs",
    "panfs",
    "pvfs2",
    "smb3",
    "smbfs",
    "wekafs",
}


def on_network(path: Path, mounts: str | None = None) -> bool:
    """Whether a path lies on a file system that other machines share.

    Args:
        path: A file or folder; it need not exist.
        mounts: The text of ``/proc/self/mountinfo``, if not this process's.
    """
    try:
        text = Path("/proc/self/mountinfo").read_text() if mounts is None else mounts
    except OSError:
        return False
    found, kind = "", ""
    for line in text.splitlines():
        fields, _, rest = line.partition(" - ")
        mounted = fields.split()[4].encode().decode("unicode_escape")
        inside = mounted == "/" or path == Path(mounted) or Path(mounted) in path.parents
        if inside and len(mounted) >= len(found):  # the last of several at one place is on top
            found, kind = mounted, rest.split()[0]
    return kind in _NETWORK or (kind.startswith("fuse") and kind != "fuseblk")


def recording_path(options: Options, names: Iterable[str]) -> Path:
    """Where a process writes its recording, under the first name that is free; makes the folder."""
    out = folder = Path(options.out)
    make_folder(out)
    if options.local or on_network(out.resolve()):
        folder = _folder(out, options.local)
        make_folder(folder)
        folder.parent.chmod(0o700)
    taken = {path.name for path in (*out.glob("*.sqlite"), *folder.glob("*.sqlite"))}
    return folder / next(name for name in names if name not in taken)


def _folder(out: Path, above: str = "") -> Path:
    """One on this node for each folder of recordings."""
    key = hashlib.blake2b(os.fsencode(out.resolve()), digest_size=8).hexdigest()
    return Path(above or f"{tempfile.gettempdir()}/tenure-{os.getuid()}") / key


def send(recording: Path, options: Options) -> Path:
    """Moves a finished recording to the folder that was asked for; returns where it is."""
    target = Path(options.out) / recording.name
    if recording == target:
        return recording
    beside = target.with_name(f".{target.name}")
    try:
        shutil.copyfile(recording, beside)
        beside.chmod(0o600)
        beside.replace(target)
        recording.unlink()
    except OSError as error:
        say(f"the recording stays at {recording}: cannot copy it to {target}: {error.strerror}")
        return recording
    return target


def left_behind(out: Path) -> list[Path]:
    """Recordings for this folder that are still on this node: of processes running or killed."""
    return sorted(_folder(out).glob("*.sqlite"))


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """One process at a time, where the file system can do that."""
    folder = -1
    with suppress(OSError):
        folder = os.open(out, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if folder >= 0:
            os.close(folder)
