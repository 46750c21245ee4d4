"""What does this model call its experts?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from moeconv.families.afmoe import AFMOE
from moeconv.families.aria import ARIA
from moeconv.families.bailing_hybrid import BAILING_HYBRID
from moeconv.families.bailing_moe import BAILING_MOE
from moeconv.families.deepseek_v2 import DEEPSEEK_V2
from moeconv.families.deepseek_v3 import DEEPSEEK_V3
from moeconv.families.deepseek_v4 import DEEPSEEK_V4
from moeconv.families.ernie_moe import ERNIE_MOE
from moeconv.families.ernie_vl_moe import ERNIE_VL_MOE
from moeconv.families.exaone_moe import EXAONE_MOE
from moeconv.families.glm_moe import GLM_MOE
from moeconv.families.gpt_oss import GPT_OSS
from moeconv.families.granite_moe import GRANITE_MOE
from moeconv.families.hunyuan_moe import HUNYUAN_MOE
from moeconv.families.hy_v3 import HY_V3
from moeconv.families.jamba import JAMBA
from moeconv.families.kimi_linear import KIMI_LINEAR
from moeconv.families.lfm2_moe import LFM2_MOE
from moeconv.families.llama4 import LLAMA4
from moeconv.families.longcat_flash import LONGCAT_FLASH
from moeconv.families.minimax_m2 import MINIMAX_M2
from moeconv.families.minimax_m3 import MINIMAX_M3
from moeconv.families.mixtral import MIXTRAL
from moeconv.families.nemotron_h import NEMOTRON_H
from moeconv.families.olmoe import OLMOE
from moeconv.families.phi_moe import PHI_MOE
from moeconv.families.qwen3_5_moe import QWEN3_5_MOE
from moeconv.families.qwen3_vl_moe import QWEN3_VL_MOE
from moeconv.families.qwen_moe import QWEN_MOE
from moeconv.families.step3 import STEP3
from moeconv.families.step3p5 import STEP3P5

if TYPE_CHECKING:
    from moeconv.families.family import Family

FAMILIES: Final[tuple[Family, ...]] = (
    AFMOE,
    ARIA,
    BAILING_HYBRID,
    BAILING_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V4,
    ERNIE_MOE,
    ERNIE_VL_MOE,
    EXAONE_MOE,
    GLM_MOE,
    GPT_OSS,
    GRANITE_MOE,
    HUNYUAN_MOE,
    HY_V3,
    JAMBA,
    KIMI_LINEAR,
    LFM2_MOE,
    LLAMA4,
    LONGCAT_FLASH,
    MINIMAX_M2,
    MINIMAX_M3,
    MIXTRAL,
    NEMOTRON_H,
    OLMOE,
    PHI_MOE,
    QWEN3_5_MOE,
    QWEN3_VL_MOE,
    QWEN_MOE,
    STEP3,
    STEP3P5,
)
