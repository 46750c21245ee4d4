"""Read byte ranges of a finished directory's files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeconv.errors import VerifyError
from moeconv.ranges.openfiles import OpenFiles

if TYPE_CHECKING:
    from moeconv.tensors import Bytes


class Files(OpenFiles):
    """Open files of a converted directory, by relative path."""

    def size(self, file: str) -> int:
        """Return how many bytes a file has.

        Raises
        ------
        VerifyError
            The file is missing, or cannot be looked at.
        """
        try:
            return (self.root / file).stat().st_size
        except OSError as error:
            raise self._unreadable(file, error) from error

    def read(self, file: str, begin: int, out: Bytes) -> None:
        """Fill `out` (contiguous bytes) from an absolute offset of a file.

        Raises
        ------
        VerifyError
            The file is missing, cannot be read or ended early.
        """
        try:
            done = self.read_range(file, begin, out)
        except OSError as error:
            raise self._unreadable(file, error) from error
        if done < out.nbytes:
            message = f"`{file}` ended early: expected {out.nbytes} bytes at {begin}, found {done}"
            raise VerifyError(message, hint="copy this file again; `moeconv verify` names all")

    def _unreadable(self, file: str, error: OSError) -> VerifyError:
        return VerifyError(f"`{self.root / file}` cannot be read: {error.strerror}")
