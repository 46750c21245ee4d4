"""What does one rank read? Each expected tensor, exactly once, into the caller's memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeconv.serving.filling import default_threads, fill

if TYPE_CHECKING:
    from moeconv.layouts.layout import Placement
    from moeconv.output.files import Files
    from moeconv.output.manifest import TensorEntry
    from moeconv.serving.memory import Out
    from moeconv.serving.shards import Shards
    from moeconv.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class RankTensor:
    """An engine parameter of one rank.

    Attributes
    ----------
    prefix, layer, param
        Path of the experts module in the checkpoint, its layer, and the engine's parameter.
    spec
        Dtype and shape in the engine, `[experts of the rank, …]`, padding included.
    experts
        Which of the layer's experts the rank holds.
    placement
        How each expert's bytes go from the file into the parameter.
    pieces
        The stored ranges of experts that hold them, in order.
    """

    prefix: str
    layer: int
    param: str
    spec: TensorSpec
    experts: range
    placement: Placement
    pieces: tuple[TensorEntry, ...]

    @property
    def nbytes(self) -> int:
        """Size of the parameter, padding included."""
        return self.spec.nbytes

    @property
    def read_bytes(self) -> int:
        """Bytes that are read from disk for it."""
        return (self.placement.end - self.placement.begin) * len(self.experts)


class Rank:
    """What one rank reads: every expected tensor exactly once.

    Made by `ConvertedDirectory.rank`. It reads from the directory's files, so only while that is
    open; any number of threads may use it.
    """

    def __init__(self, files: Files, shards: Shards, tensors: tuple[RankTensor, ...]) -> None:
        self._files = files
        self._shards = shards
        self._tensors = tensors

    def tensors(self, prefix: str | None = None) -> tuple[RankTensor, ...]:
        """Return the tensors of the experts module `prefix`, or of all."""
        return tuple(tensor for tensor in self._tensors if prefix in {None, tensor.prefix})

    def read_into(self, tensor: RankTensor, out: Out, *, check: bool = False) -> None:
        """Fill `out` with the parameter's bytes in the engine's order, zeros where it pads.

        Parameters
        ----------
        tensor
            One of `tensors()`.
        out
            `tensor.nbytes` contiguous bytes that may be written: a numpy array or a torch tensor of
            any dtype, on the host or on a GPU.
        check
            Compare the digest of each whole expert first (reads more where TP cuts).

        Raises
        ------
        ValueError
            `out` has gaps or another size, or cannot be filled.
        VerifyError
            A file is not the one that was written, or short, or a digest differs.
        """
        self._fill([(tensor, out)], 1, check=check)

    def read_all(
        self,
        assignments: Iterable[tuple[RankTensor, Out]],
        *,
        threads: int | None = None,
        check: bool = False,
    ) -> None:
        """Fill the memory of many tensors, several at a time.

        Parameters
        ----------
        assignments
            Tensors of `tensors()`, each with its memory as for `read_into`: of every module that
            is named, each tensor exactly once.
        threads
            How many read at once; 8 by default, or one a CPU core where these are fewer.
        check
            As for `read_into`.

        Raises
        ------
        ValueError
            A tensor is missing or given twice, or some memory is not as `read_into` wants it, or
            overlaps with other.
        VerifyError
            A file is not the one that was written, or short, or a digest differs.
        """
        given = list(assignments)
        named = {tensor.prefix for tensor, _ in given}
        expected = sorted((t.prefix, t.param) for t in self._tensors if t.prefix in named)
        found = sorted((tensor.prefix, tensor.param) for tensor, _ in given)
        if found != expected:
            odd = next(
                (name for name in sorted({*expected, *found}) if found.count(name) != 1),
                found[0],
            )
            message = f"`{'.'.join(odd)}` is given {found.count(odd)} times, expected once"
            raise ValueError(message)
        self._fill(given, threads or default_threads(), check=check)

    def _fill(self, given: Sequence[tuple[RankTensor, Out]], threads: int, *, check: bool) -> None:
        self._shards.check(piece.file for tensor, _ in given for piece in tensor.pieces)
        fill(self._files, given, threads, check=check)
