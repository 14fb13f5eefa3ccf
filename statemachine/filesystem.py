"""What kind of filesystem a database file would lie on, and whether file locks hold there.

Owns nothing. SQLite's write-ahead log needs memory shared by all its users, which no network filesystem
gives; a rollback journal needs only locks, and those can be tried.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

_NETWORK = {
    "9p", "afs", "beegfs", "ceph", "cifs", "gfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs",
    "nfs4", "ocfs2", "orangefs", "panfs", "prl_fs", "pvfs2", "smb", "smb2", "smb3", "smbfs", "vboxsf",
    "virtiofs", "vmhgfs", "webdav",
}  # fmt: skip

_PROBE_SECONDS = 30

# The second process: may it begin to write while the first one is writing?
_SECOND_PROCESS = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], uri=True, timeout=0, isolation_level=None)
try:
    connection.execute("BEGIN IMMEDIATE")
except sqlite3.OperationalError as error:
    print("held" if "locked" in str(error) else "broken")
else:
    print("free")
"""


def network_filesystem(path: Path) -> str | None:
    """The type of the filesystem that `path` lies on or would lie on, if it is one over a network."""
    target = os.path.realpath(path)
    kind, longest = "", -1
    for partition in psutil.disk_partitions(all=True):
        mount = partition.mountpoint.rstrip("/")
        # later mounts cover earlier ones at the same place
        if (target == mount or target.startswith(mount + "/")) and len(mount) >= longest:
            kind, longest = partition.fstype, len(mount)
    # everything in user space: what lies behind it cannot be known (sshfs, s3fs, rclone, ...)
    return kind if kind.lower() in _NETWORK or kind.startswith("fuse.") else None


def locks_hold(folder: Path, *, vfs: str = "unix") -> bool:
    """Whether a lock that one process takes on a file in `folder` keeps another out, and is let go again."""
    with tempfile.TemporaryDirectory(prefix=".lock-probe-", dir=folder, ignore_cleanup_errors=True) as probe:
        uri = f"{(Path(probe) / 'probe.db').absolute().as_uri()}?vfs={vfs}"
        try:
            first = sqlite3.connect(uri, uri=True, timeout=0, isolation_level=None)
            try:
                first.execute("CREATE TABLE probe (n)")
                first.execute("BEGIN IMMEDIATE")
                while_held = _ask_second_process(uri)
                first.execute("COMMIT")
                return while_held == "held" and _ask_second_process(uri) == "free"
            finally:
                first.close()
        except (sqlite3.Error, subprocess.SubprocessError):
            return False


def _ask_second_process(uri: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-c", _SECOND_PROCESS, uri],
        capture_output=True,
        text=True,
        timeout=_PROBE_SECONDS,
        check=True,
    )
    return answer.stdout.strip()
