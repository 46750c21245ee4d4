"""Read what one rank needs of a converted directory, straight into the caller's memory.

Only the rank's own bytes are read: of each expert one contiguous range, through a small staging
buffer, placed by a strided copy. There is no index map and no second tensor.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from moeconv.counts import check_count
from moeconv.errors import UnsupportedError, VerifyError
from moeconv.layouts import find_layout
from moeconv.layouts.layout import Geometry, Placement
from moeconv.output.codec import read_manifest
from moeconv.output.files import Files
from moeconv.output.manifest import StackEntry, TensorEntry
from moeconv.planning.acceptance import make_command
from moeconv.serving.rank import Rank, RankTensor
from moeconv.serving.shards import Shards

if TYPE_CHECKING:
    from moeconv.layouts.layout import Layout, Order
    from moeconv.output.manifest import Manifest


class ConvertedDirectory:
    """A converted directory, opened for reading; safe to use from several threads.

    Parameters
    ----------
    root
        The directory.
    allow_partial
        Open a conversion of some layers only.

    Raises
    ------
    SourceError
        It has no manifest.
    UnsupportedError
        It is partial, or its layout is not known to this version.
    VerifyError
        The manifest is broken.
    """

    def __init__(self, root: Path, *, allow_partial: bool = False) -> None:
        self.root = root
        self.manifest: Manifest = read_manifest(root)
        if self.manifest.partial and not allow_partial:
            message = f"`{root}` holds only {self.manifest.partial} of the model"
            raise UnsupportedError(message, hint="it was made with `--layers`, for a trial")
        self.layout = _layout(self.manifest)
        self._files = Files(root)
        self._shards = Shards(self._files, self.manifest)
        self._ranks: dict[tuple[int, int, int, int], Rank] = {}
        self._stored: dict[tuple[str, str, int | None], list[TensorEntry]] = {}
        for entry in self.manifest.tensors:
            self._stored.setdefault((entry.prefix, entry.param, entry.rank), []).append(entry)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files that were opened so far."""
        self._files.close()

    def weight_files(self) -> tuple[Path, ...]:
        """Return the files of tensors that passed through, under their own names.

        Raises
        ------
        VerifyError
            One is missing, or not the one that was written.
        """
        names = sorted({weight.file for weight in self.manifest.weights})
        self._shards.check(names)
        return tuple(self.root / name for name in names)

    def rank(
        self, *, tp_size: int = 1, tp_rank: int = 0, ep_size: int = 1, ep_rank: int = 0
    ) -> Rank:
        """Return the view of one rank.

        Parameters
        ----------
        tp_size, tp_rank
            Tensor parallelism of the experts (1 and 0 under expert parallelism).
        ep_size, ep_rank
            Expert parallelism: every rank has whole experts, a contiguous range of equal size.

        Raises
        ------
        UnsupportedError
            One is no whole number, or the file cannot serve these sizes; the hint is then the
            command that makes one that does.
        """
        key = (tp_size, tp_rank, ep_size, ep_rank)
        for name, value in zip(("tp_size", "tp_rank", "ep_size", "ep_rank"), key, strict=True):
            check_count(name, value)
        if key not in self._ranks:
            tensors = tuple(
                tensor
                for stack in self.manifest.stacks
                for tensor in self._rank_tensors(stack, key[:2], key[2:])
            )
            self._ranks[key] = Rank(self._files, self._shards, tensors)
        return self._ranks[key]

    def _rank_tensors(
        self, stack: StackEntry, tp: tuple[int, int], ep: tuple[int, int]
    ) -> tuple[RankTensor, ...]:
        geometry = stack_geometry(stack)
        (tp_size, tp_rank), (ep_size, ep_rank) = tp, ep
        _check_ranks(stack, tp, ep)
        made_for = self.manifest.layout.tp
        if made_for is None:
            self._check_tp(stack, geometry, tp_size)
            placements = self.layout.placements(geometry, tp_size, tp_rank)
        elif made_for == tp_size:
            placements = _in_place(self.layout, geometry, tp_size, tp_rank)
        else:
            message = f"`{self.root}` was made for TP {made_for}, not for {tp_size}"
            raise UnsupportedError(message, hint=self._advice(geometry, tp_size))
        each = geometry.experts // ep_size
        experts = range(each * ep_rank, each * (ep_rank + 1))
        rank = None if made_for is None else tp_rank
        return tuple(
            RankTensor(
                stack.prefix,
                stack.layer,
                placement.param,
                placement.spec.stacked(each),
                experts,
                placement,
                self._pieces(stack.prefix, placement.param, rank, experts),
            )
            for placement in placements
        )

    def _check_tp(self, stack: StackEntry, geometry: Geometry, tp: int) -> None:
        reason = self.layout.tp_refusal(geometry, tp)
        if reason:
            message = f"`{self.root}` cannot serve TP {tp} of `{stack.prefix}`: {reason}"
            raise UnsupportedError(message, hint=self._advice(geometry, tp))

    def _advice(self, geometry: Geometry, tp: int) -> str:
        if self.layout.rank_refusal(geometry, tp):
            return "no file can be made for it: choose another TP size, or expert parallelism"
        command = f"moeconv {make_command(self.layout)} {self.manifest.source.name} --tp {tp}"
        return f"make a file for it: `{command}`"

    def _pieces(
        self, prefix: str, param: str, rank: int | None, experts: range
    ) -> tuple[TensorEntry, ...]:
        """Return the stored ranges that hold these experts; every expert exactly once."""
        pieces = [
            entry
            for entry in self._stored.get((prefix, param, rank), ())
            if entry.first < experts.stop and entry.last >= experts.start
        ]
        pieces.sort(key=lambda entry: entry.first)
        # Each begins where the one before ends; nothing is counted one by one, since a manifest
        # may say any number.
        begins = [max(entry.first, experts.start) for entry in pieces]
        ends = [min(entry.last + 1, experts.stop) for entry in pieces]
        if [experts.start, *ends] != [*begins, experts.stop]:
            span = f"{experts.start} to {experts.stop - 1}"
            message = f"`{prefix}.{param}` does not hold each of the experts {span} once"
            raise VerifyError(message, hint="the manifest is broken; convert again")
        return tuple(pieces)


def open_converted(root: str | Path, *, allow_partial: bool = False) -> ConvertedDirectory:
    """Open a converted directory; see `ConvertedDirectory`."""
    return ConvertedDirectory(Path(root), allow_partial=allow_partial)


def stack_geometry(stack: StackEntry) -> Geometry:
    """Return the sizes of a stack as layouts take them."""
    order: Order = "pairs" if stack.order == "pairs" else "halves"
    return Geometry(stack.experts, stack.hidden, stack.intermediate, stack.gated, order)


def _layout(manifest: Manifest) -> Layout:
    entry = manifest.layout
    layout = find_layout(entry.id, manifest.dtype)
    if layout and layout.version == entry.version:
        return layout
    message = f"the layout {entry.id} version {entry.version} is not known to this moeconv"
    raise UnsupportedError(message, hint="install the moeconv that wrote it, or convert again")


def _in_place(layout: Layout, geometry: Geometry, tp: int, rank: int) -> tuple[Placement, ...]:
    """Return placements of a file in the engine's order: every expert is one plain range."""
    outputs = layout.outputs(geometry, layout.rank_slice(geometry, tp, rank))
    return tuple(
        Placement(
            output.param,
            output.spec,
            0,
            output.spec.nbytes,
            stored=(1,),
            axes=(0,),
            final=(1,),
            item_bytes=output.spec.nbytes,
        )
        for output in outputs
    )


def _check_ranks(stack: StackEntry, tp: tuple[int, int], ep: tuple[int, int]) -> None:
    for (size, rank), what in ((tp, "TP"), (ep, "EP")):
        if not 0 <= rank < size:
            message = f"there is no {what} rank {rank} of {size}"
            raise UnsupportedError(message, hint="ranks count from 0")
    if stack.experts % ep[0]:
        message = f"the {stack.experts} experts of `{stack.prefix}` do not divide by EP {ep[0]}"
        raise UnsupportedError(message, hint="kernels take equal, contiguous expert ranges only")
