"""A store in a plain folder: laptops, tests, and shared file systems."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from tasks.contract.errors import StorageError
from tasks.storage.base import ObjectInfo
from tasks.storage.paths import RESERVED, TEMPORARY, check_path, check_prefix, copied_to
from tasks.storage.probe import probe_store

_LOCKS = f"{RESERVED}locks"
_PARENT_ATTEMPTS = 20
_STALE_SECONDS = 24 * 3600.0
_ADVICE = {
    errno.ENOSPC: "no space left: free some there, or choose another root",
    errno.EDQUOT: "the disk quota is used up: free some space there, or choose another root",
    errno.EACCES: "not permitted: let the user that runs the tasks write there",
    errno.EPERM: "not permitted: let the user that runs the tasks write there",
    errno.EROFS: "the file system is read-only: mount it writable",
    errno.EISDIR: "a folder stands where the object would be",
    errno.ENOTDIR: "an object stands where the path needs a folder",
    errno.EEXIST: "an object stands where the path needs a folder",
    errno.ENAMETOOLONG: "the path is too long for the file system",
}


class FolderStore:
    """Objects as files below one folder. Works between processes, and between hosts on a file system with POSIX
    rename, hard links and flock (NFS 4 has all three).

    A file is written under a temporary name in its own folder, synced, and renamed, so no reader sees a part of it.
    """

    def __init__(self, root: Path) -> None:
        self._folder = Path(os.path.abspath(root))

    @property
    def root(self) -> str:
        """The absolute folder."""
        return str(self._folder)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes from `start`, at most `length`; fewer at the end of the object."""
        if start < 0 or (length is not None and length < 0):
            raise ValueError(f"read of {path}: start {start} and length {length} must not be negative")
        with self._reading(path) as final, open(final, "rb") as handle:
            handle.seek(start)
            return handle.read(-1 if length is None else length)

    def read_with_tag(self, path: str) -> tuple[bytes, str]:
        """Content and tag of the same version: a replaced file is another inode, which this handle never sees."""
        with self._reading(path) as final, open(final, "rb") as handle:
            return handle.read(), _tag(os.fstat(handle.fileno()))

    def download(self, path: str, target: Path) -> None:
        """Copy to a local file; it appears whole or not at all."""
        with ExitStack() as stack:
            with self._reading(path) as final:
                source = stack.enter_context(open(final, "rb"))
            size = os.fstat(source.fileno()).st_size
            with copied_to(target, self.root, path) as temporary:
                with open(temporary, "xb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 20)
                if (found := temporary.stat().st_size) != size:
                    raise StorageError(f"{self.root}: copied {found:,} of the {size:,} bytes of {path}; try again")

    def stat(self, path: str) -> ObjectInfo:
        """Size, tag and time of one object."""
        with self._reading(path) as final:
            status = final.stat()
            if final.is_dir():
                raise IsADirectoryError(errno.EISDIR, "is a folder")
            return _info(path, status)

    def exists(self, path: str) -> bool:
        """Whether an object of that path is there."""
        try:
            self.stat(path)
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose path starts with `prefix`, in path order. Temporary files are none."""
        folder, _, _ = check_prefix(prefix).rpartition("/")
        try:
            for info in self._walk(f"{folder}/" if folder else ""):
                if info.path.startswith(prefix):
                    yield info
        except OSError as error:
            raise self._failed("list", prefix, error) from error

    def _walk(self, folder: str) -> Iterator[ObjectInfo]:
        try:
            with os.scandir(self._folder / folder) as scan:
                entries = [entry for entry in scan if not entry.name.startswith(RESERVED)]
        except (FileNotFoundError, NotADirectoryError):
            return
        # A folder sorts as its objects do: with the slash, so that "a-b/x" comes before "a/x" as it does in S3.
        named = [(f"{e.name}/" if e.is_dir(follow_symlinks=False) else e.name, e) for e in entries]
        for name, entry in sorted(named, key=lambda pair: os.fsencode(pair[0])):
            if name.endswith("/"):
                yield from self._walk(f"{folder}{name}")
            elif entry.is_file(follow_symlinks=False):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # deleted since the folder was read
                    continue
                yield _info(f"{folder}{name}", status)

    # ---- writing ----------------------------------------------------------------------------------------------------

    def write(self, path: str, data: bytes | Path) -> None:
        """Write an object, whole or not at all; what was there is replaced."""
        if isinstance(data, Path):
            with open(data, "rb") as source:
                self._write(path, source)
        else:
            self._write(path, data)

    def _write(self, path: str, data: bytes | BinaryIO) -> None:
        with self._writing(path) as final, self._temporary(final, data) as temporary, self._lock(path):
            os.replace(temporary, final)
            _sync_folder(final.parent)

    def create(self, path: str, data: bytes) -> bool:
        """Write if nothing is there. The hard link is what makes it atomic: it never replaces a name."""
        with self._writing(path) as final:
            if final.is_dir():
                raise IsADirectoryError(errno.EISDIR, "is a folder")
            if final.exists():  # spares the temporary file; the link decides
                return False
            with self._temporary(final, data) as temporary:
                try:
                    os.link(temporary, final)
                except FileExistsError:
                    return False
                except OSError as error:
                    if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                        raise StorageError(
                            f"{self.root}: cannot create {path}: the file system has no hard links ({error.strerror}); "
                            "put the store on another file system, or use S3"
                        ) from error
                    raise
                _sync_folder(final.parent)
                return True

    def replace(self, path: str, data: bytes, tag: str) -> bool:
        """Write if the object still has this tag."""
        with self._writing(path) as final, self._lock(path):
            try:
                current = _tag(final.stat())
            except (FileNotFoundError, NotADirectoryError):
                return False
            if current != tag:
                return False
            with self._temporary(final, data) as temporary:
                os.replace(temporary, final)
                _sync_folder(final.parent)
            return True

    def delete(self, path: str) -> None:
        """Remove an object, and the folders that are empty then."""
        with self._writing(path) as final:
            if not os.path.lexists(final):
                return
            with self._lock(path):
                final.unlink(missing_ok=True)
            for folder in final.parents:
                if folder == self._folder or not _remove_if_empty(folder):
                    return

    def probe(self) -> Sequence[str]:
        """What of the interface's promises does not hold here, in words."""
        return probe_store(self)

    # ---- below ------------------------------------------------------------------------------------------------------

    def _resolve(self, path: str) -> Path:
        final = self._folder / check_path(path)
        real, root = os.path.realpath(final), os.path.realpath(self._folder)
        if os.path.commonpath([real, root]) != root:
            raise StorageError(
                f"{self.root}: {path} leads out of the root, to {real}, through a symbolic link; remove the link, or "
                "mount the other file system there"
            )
        return final

    @contextmanager
    def _temporary(self, final: Path, data: bytes | BinaryIO) -> Iterator[Path]:
        """A synced file with the content, in the folder of `final`."""
        handle = self._open_temporary(final)
        temporary = Path(handle.name)
        try:
            with handle:
                if isinstance(data, bytes):
                    handle.write(data)
                else:
                    shutil.copyfileobj(data, handle, 1 << 20)
                handle.flush()
                # The kernel stamps files with the time of its last tick. The exact time makes the tag unique even when
                # an inode is used again within one tick.
                now = time.time_ns()
                os.utime(handle.fileno(), ns=(now, now))
                os.fsync(handle.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def _open_temporary(self, final: Path) -> BinaryIO:
        temporary = final.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
        for attempt in range(_PARENT_ATTEMPTS):
            try:
                final.parent.mkdir(parents=True, exist_ok=True)
                return open(temporary, "xb")
            except (FileNotFoundError, FileExistsError):
                # A deletion elsewhere removed a parent as empty just now: make it again.
                if attempt == _PARENT_ATTEMPTS - 1:
                    raise
                time.sleep(0.001 * attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")

    @contextmanager
    def _lock(self, path: str) -> Iterator[None]:
        """Exclusive between processes and threads; the kernel releases it however the holder ends.

        One of 256 files by the path's digest, never removed: a lock file that is removed can be held twice.
        """
        folder = self._folder / _LOCKS
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / hashlib.sha256(path.encode()).hexdigest()[:2], "ab") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _reading(self, path: str) -> Iterator[Path]:
        try:
            yield self._resolve(path)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise FileNotFoundError(errno.ENOENT, f"no such object in {self.root}", path) from error
        except OSError as error:
            raise self._failed("read", path, error) from error

    @contextmanager
    def _writing(self, path: str) -> Iterator[Path]:
        try:
            yield self._resolve(path)
        except OSError as error:
            raise self._failed("write", path, error) from error

    def _failed(self, action: str, path: str, error: OSError) -> StorageError:
        advice = _ADVICE.get(error.errno or 0, "look at the file system")
        return StorageError(f"{self.root}: cannot {action} {path}: {error.strerror or error}; {advice}")


def _tag(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}"


def _info(path: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(path=path, size=status.st_size, tag=_tag(status), modified=status.st_mtime)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut: a receipt must not outlive its objects."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_if_empty(folder: Path) -> bool:
    """Whether the folder is gone. Temporary files that a killed writer left a day ago do not keep it."""
    try:
        with os.scandir(folder) as scan:
            for entry in scan:
                age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                if not entry.name.startswith(TEMPORARY) or age < _STALE_SECONDS:
                    return False
                os.unlink(entry.path)
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # an object was written in between
            return False
        raise
    return True
