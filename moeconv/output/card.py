"""What does the model card of a published conversion say?

Metadata is as the Hub's conventions have it. A copy in another format is listed among the
quantizations of its base model, as GGUF and MLX copies are: there are four relations, and without
one the Hub takes it for a fine-tune. `library_name` is who reads the files: a repository with a
`config.json` and no such name is taken for one of transformers. Licence, languages and task are
the source's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final

import yaml

from moeconv.errors import SourceError
from moeconv.output.names import MANIFEST_NAME, SOURCE_CARD

if TYPE_CHECKING:
    from moeconv.output.manifest import Manifest

_CARRIED: Final = ("license", "license_name", "license_link", "language", "pipeline_tag")
_TERMS: Final = "extra_gated_"
"""What a gated model asks of people; it holds for a copy that is made a gated one."""

_FORMATS: Final = frozenset({"bf16", "mxfp4", "nvfp4"})
_FLOATS: Final = frozenset({"BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "F4"})


@dataclass(frozen=True, slots=True)
class Serving:
    """An engine that takes the files, its versions, and the command that starts it."""

    engine: str
    versions: str
    command: str


def carried(source_card: str) -> dict[str, object]:
    """Return what the metadata of the source's card says that holds for a copy too.

    Raises
    ------
    SourceError
        It is no YAML.
    """
    if re.match(r"\s*---[\r\n]", source_card) is None:  # the library would complain of it on stderr
        return {}
    from huggingface_hub import ModelCard

    try:
        said = ModelCard(source_card, ignore_metadata_errors=True).data
    except (ValueError, yaml.YAMLError) as error:
        message = f"the metadata of `README.md` cannot be read: {' '.join(str(error).split())}"
        hint = "mend what is between its two `---`; the licence is taken from there"
        raise SourceError(message, hint=hint) from error
    return {
        key: value
        for key, value in vars(said).items()
        if value is not None and (key in _CARRIED or key.startswith(_TERMS))
    }


def write_card(
    name: str, manifest: Manifest, source_card: str, serving: Sequence[Serving]
) -> bytes:
    """Return the card of the repository `name`.

    Parameters
    ----------
    name
        The repository, `org/name`.
    manifest
        What is published.
    source_card
        The source's `README.md`; empty where it has none.
    serving
        Who takes it.

    Raises
    ------
    SourceError
        The metadata of the source's card is no YAML.
    """
    said = _with_link(carried(source_card), manifest)
    base = manifest.source.name if manifest.source.revision else None
    engines = {row.engine.lower() for row in serving}
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        base_model=base,
        base_model_relation="quantized" if base else None,
        library_name="moeconv",
        tags=sorted({"moe", "moeconv", manifest.layout.id, *_formats(manifest), *engines}),
    )
    for key, value in said.items():
        data[key] = value
    parts = (
        *_what(name, manifest),
        *_serve(serving),
        *_check(name, manifest),
        *_contents(manifest),
        *_origin(manifest, said, has_source_card=bool(source_card)),
    )
    text = "\n\n".join(parts)
    return f"---\n{data.to_yaml()}\n---\n\n{text}\n".encode()


def _with_link(said: dict[str, object], manifest: Manifest) -> dict[str, object]:
    """Let a link to a licence that is a file of the source, and of no copy, lead to the source."""
    link, source = said.get("license_link"), manifest.source
    kept = {entry.path for entry in manifest.files}
    if not isinstance(link, str) or ":" in link or link in kept or source.revision is None:
        return said
    there = f"https://huggingface.co/{source.name}/blob/{source.revision}/{link}"
    return {**said, "license_link": there}


def _formats(manifest: Manifest) -> set[str]:
    """Return the number formats of the experts, as people look for them."""
    return {part for stack in manifest.stacks for part in stack.scheme.split("-")} & _FORMATS


def parameters(manifest: Manifest) -> tuple[int, int]:
    """Return how many parameters the experts have, and all other tensors of floats.

    Experts are counted by their sizes, not by what their bytes are packed into; scales are none.
    """
    experts = sum(
        stack.experts * (3 if stack.gated else 2) * stack.hidden * stack.intermediate
        for stack in manifest.stacks
    )
    others = sum(
        prod(weight.shape)
        for weight in manifest.weights
        if weight.dtype in _FLOATS and "scale" not in weight.name.rsplit(".", 1)[-1]
    )
    return experts, others


def _what(name: str, manifest: Manifest) -> Iterator[str]:
    source, layout = manifest.source, manifest.layout
    yield f"# {name.rsplit('/', 1)[-1]}"
    of = (
        f"[{source.name}](https://huggingface.co/{source.name})" if source.revision else source.name
    )
    yield (
        f"{of} with its experts in the byte layout `{layout.id}`, which serving kernels read as it "
        "is: an engine starts without transforming weights, and each rank reads only its own part. "
        "Nothing was trained, and no other tensor was changed."
    )
    if manifest.partial:
        yield f"**Only {manifest.partial} of the model are here, for a trial; no engine takes it.**"
    yield (
        "Other tools find no weights here: the files are for the engines below, with `moeconv` "
        "installed beside them."
    )


def _serve(serving: Sequence[Serving]) -> Iterator[str]:
    yield "## Serve"
    for row in serving:
        yield f"{row.engine} {row.versions}:"
        yield f"```bash\n{row.command}\n```"
    if not serving:
        yield "No engine that moeconv knows takes this model in this layout."


def _check(name: str, manifest: Manifest) -> Iterator[str]:
    yield "## Verify"
    yield (
        f"`{MANIFEST_NAME}` has a digest of every file, every tensor and every expert. This reads "
        "headers, then all bytes:"
    )
    yield f"```bash\nmoeconv verify {name}\nmoeconv verify {name} --read-data\n```"
    yield "## Restore"
    if manifest.restore is None:
        yield (
            "The original checkpoint cannot be had from these files: its headers, and what the "
            "layout has no use for, were left out."
        )
        return
    yield (
        f"The original checkpoint, byte for byte; {manifest.restore.nbytes:,} bytes in `restore/` "
        "are for this alone:"
    )
    yield (
        f"```bash\nhf download {name} --local-dir ./converted\n"
        "moeconv restore ./converted --out ./original\n```"
    )


def _contents(manifest: Manifest) -> Iterator[str]:
    experts, others = parameters(manifest)
    sizes = sorted(set.intersection(*(set(stack.tp_sizes) for stack in manifest.stacks)))
    first = manifest.stacks[0]
    rows = (
        ("layout", f"`{manifest.layout.id}` version {manifest.layout.version}"),
        ("serving dtype", manifest.dtype),
        ("tensor-parallel sizes", ", ".join(map(str, sizes))),
        ("layers with experts", str(len(manifest.stacks))),
        ("experts a layer", str(first.experts)),
        ("parameters", f"{experts + others:,}"),
        ("of them in experts", f"{experts:,}"),
        ("size", f"{sum(entry.size for entry in manifest.files):,} bytes"),
    )
    yield "## What is in it"
    yield _table(rows)


def _origin(manifest: Manifest, said: dict[str, object], *, has_source_card: bool) -> Iterator[str]:
    source, run = manifest.source, manifest.run
    tools = ", ".join(f"{name} {version}" for name, version in manifest.tools.items())
    rows = (
        ("base model", source.name),
        ("revision", f"`{source.revision}`" if source.revision else "a local directory"),
        ("licence", str(said.get("license_name", said.get("license", "as the base model")))),
        ("made with", tools),
        ("last run", f"{run.seconds:.0f} s on {run.device} ({run.kernels}), {run.workers} workers"),
        ("peak memory", f"{run.peak_rss_bytes:,} bytes"),
        ("plan", f"`{manifest.plan_id}`"),
    )
    yield "## Where it comes from"
    yield _table(rows)
    if has_source_card:
        yield (
            f"What its authors say of the model is in [{SOURCE_CARD}]({SOURCE_CARD}), as they "
            "wrote it; their licence and notices are beside it."
        )


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(("| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)))
