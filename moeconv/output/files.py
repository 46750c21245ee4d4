"""Read byte ranges of a finished directory's files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeconv.errors import VerifyError
from moeconv.openfiles import OpenFiles

if TYPE_CHECKING:
    from moeconv.tensors import Bytes


class Files(OpenFiles):
    """Open files of a converted directory, by relative path."""

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
            message = f"`{self.root / file}` cannot be read: {error.strerror}"
            raise VerifyError(message) from error
        if done < out.nbytes:
            message = f"`{file}` ended early: expected {out.nbytes} bytes at {begin}, found {done}"
            raise VerifyError(message, hint="copy this file again; `moeconv verify` names all")
