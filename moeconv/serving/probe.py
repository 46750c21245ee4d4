"""Does the installed engine still want these bytes? Its own functions on the layout's probe."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch

from moeconv.errors import VerifyError
from moeconv.layouts.fingerprint import PROBE, probe_matrix

if TYPE_CHECKING:
    from moeconv.layouts.layout import Geometry
    from moeconv.serving.reader import ConvertedDirectory

Own: TypeAlias = "Callable[[torch.Tensor, Geometry], torch.Tensor]"
"""What an engine makes of one source matrix, given as rows of bytes."""


def check(converted: ConvertedDirectory, functions: Callable[[], Mapping[str, Own]]) -> str:
    """Compare the engine's bytes of the probe with the manifest's digests; say what was compared.

    Parameters
    ----------
    converted
        Whose layout and digests.
    functions
        Returns the engine's function for each parameter that it has one for.

    Raises
    ------
    VerifyError
        The engine lays some parameter out in another way.
    """
    layout, digests = converted.layout, converted.manifest.layout.fingerprint
    try:
        own = functions()
    except (ImportError, AttributeError) as error:
        return f"not checked: {error}"
    compared = []
    for geometry in PROBE:
        kind = "gated" if geometry.gated else "plain"
        if layout.refusal(geometry):
            continue
        for output in layout.outputs(geometry, layout.rank_slice(geometry, 1, 0)):
            name = f"{kind}.{output.param}"
            if output.param not in own or name not in digests:
                continue
            matrix = torch.from_numpy(probe_matrix(output))
            made = own[output.param](matrix, geometry)
            data = made.contiguous().view(-1).view(torch.uint8).cpu().numpy()
            if hashlib.sha256(data).hexdigest() != digests[name]:
                message = (
                    f"`{converted.root}` holds the layout {layout.id}, but the installed engine "
                    f"lays {output.param} out in another way"
                )
                hint = "this version of the engine needs another version of moeconv's layout"
                raise VerifyError(message, hint=hint)
            compared.append(name)
    return f"equal for {', '.join(compared)}" if compared else "not checked: no function for it"
