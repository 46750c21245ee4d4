"""The card of a copy: what it takes over from the source's, and what it says of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from moeconv.output.card import write_card
from moeconv.output.codec import read_manifest
from moeconv.output.manifest import FileEntry, Manifest

SOURCE = "org/source"
CARD = """---
license: other
license_name: tiny-licence
license_link: {link}
base_model: org/first
pipeline_tag: text-generation
library_name: transformers
extra_gated_prompt: be good
tags: [chat]
---
"""


@pytest.fixture
def manifest(converted: Path) -> Manifest:
    found = read_manifest(converted)
    return replace(found, source=replace(found.source, name=SOURCE, revision="c0ffee"))


def card(manifest: Manifest, link: str) -> ModelCard:
    return ModelCard(write_card("org/copy", manifest, CARD.format(link=link), ()).decode())


def test_what_holds_for_a_copy_is_taken_over(manifest: Manifest):
    data = card(manifest, "https://example.org/licence").data.to_dict()
    assert data == {
        "base_model": SOURCE,
        "base_model_relation": "quantized",
        "extra_gated_prompt": "be good",
        "library_name": "moeconv",
        "license": "other",
        "license_name": "tiny-licence",
        "license_link": "https://example.org/licence",
        "pipeline_tag": "text-generation",
        "tags": ["bf16", "moe", "moeconv", "trtllm-bf16"],
    }


def test_a_link_to_a_licence_leads_to_a_file_that_is_there(manifest: Manifest):
    there = f"https://huggingface.co/{SOURCE}/blob/c0ffee/LICENSE"
    assert card(manifest, "LICENSE").data.get("license_link") == there
    kept = replace(manifest, files=(*manifest.files, FileEntry("LICENSE", 1, "0" * 64)))
    assert card(kept, "LICENSE").data.get("license_link") == "LICENSE"


def test_a_directory_of_this_machine_is_no_base_model(manifest: Manifest):
    local = replace(manifest, source=replace(manifest.source, revision=None))
    data = card(local, "LICENSE").data
    assert data.get("base_model") is data.get("base_model_relation") is None
