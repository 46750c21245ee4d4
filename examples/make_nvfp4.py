"""Round the experts of a BF16 Qwen3-MoE checkpoint to NVFP4, named as ModelOpt names them.

    python examples/make_nvfp4.py SOURCE DIR

For trying things out: plain rounding, without calibration. Holds the whole model in memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

# Shapes: R rows, C columns, G = C / 16 groups.

GROUP, LARGEST_CODE, LARGEST_SCALE = 16, 6.0, 448.0
MIDDLES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
"""Between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""


def global_scale(*matrices: torch.Tensor) -> torch.Tensor:
    """Return the scale over the block scales; gate and up have one, since they become one."""
    return max(x.abs().max() for x in matrices) / (LARGEST_CODE * LARGEST_SCALE)


def rounded(x_RC: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes, two a byte with the low nibble first, and the block scales."""
    x_RGg = x_RC.unflatten(1, (-1, GROUP))
    block_RG = (x_RGg.abs().amax(-1) / LARGEST_CODE / scale).to(torch.float8_e4m3fn)
    values_RGg = x_RGg / (block_RG.float() * scale).clamp_min(1e-30).unsqueeze(-1)
    codes_RGg = torch.bucketize(values_RGg.abs(), MIDDLES) + 8 * (values_RGg < 0)
    codes_RC = codes_RGg.flatten(1).to(torch.uint8)
    return codes_RC[:, 0::2] | codes_RC[:, 1::2] << 4, block_RG


def quantised(stem: str, table: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of one expert."""
    gate, up, down = (
        table[f"{stem}.{name}_proj.weight"].float() for name in ("gate", "up", "down")
    )
    fused = global_scale(gate, up)
    for name, x, scale in (
        ("gate", gate, fused),
        ("up", up, fused),
        ("down", down, global_scale(down)),
    ):
        codes, block = rounded(x, scale)
        yield f"{stem}.{name}_proj.weight", codes
        yield f"{stem}.{name}_proj.weight_scale", block
        yield f"{stem}.{name}_proj.weight_scale_2", scale.clone()
        yield f"{stem}.{name}_proj.input_scale", torch.tensor(1.0)


def main(source: Path, root: Path) -> None:
    """Write the checkpoint."""
    table: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            table |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    stems = {name.rsplit(".", 2)[0] for name in table if ".mlp.experts." in name}
    out = {name: x for name, x in table.items() if ".mlp.experts." not in name}
    for stem in sorted(stems):
        out.update(quantised(stem, table))
    root.mkdir(parents=True, exist_ok=True)
    save_file(out, root / "model.safetensors", metadata={"format": "pt"})
    modules = ["lm_head", "model.embed_tokens", "*self_attn*", "*mlp.gate"]
    config = json.loads((source / "config.json").read_text())
    algorithm = {"quant_algo": "NVFP4", "group_size": GROUP}
    config["quantization_config"] = {"quant_method": "modelopt", **algorithm, "ignore": modules}
    (root / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    hf_quant_config = {"quantization": {**algorithm, "exclude_modules": modules}}
    (root / "hf_quant_config.json").write_text(json.dumps(hf_quant_config, indent=1) + "\n")
    print(f"{root}: {len(stems)} experts, {sum(x.nbytes for x in out.values()) / 1e6:.1f} MB")


if __name__ == "__main__":
    if not sys.argv[2:]:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
