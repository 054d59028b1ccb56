"""Names of files in the directories of trainers.

Apart from the names in ``trainers``, which are needed for one file too: these take time to compile.
"""

from __future__ import annotations

import re
from typing import Final

from ckptmove.torch_facts.optimizers import TABLE

#: What a rank of ZeRO saves of its optimizer.
ZERO_FILE: Final = re.compile(r".*zero_pp_rank_\d+_mp_rank_\d+\w*_optim_states\.pt")
#: What a data-parallel rank of ZeRO stage 3 saves of the model: the same buffers as the others. The rank is a group.
STAGE_3_FILE: Final = re.compile(r".*zero_pp_rank_0*(\d+)_mp_rank_\d+_model_states\.pt")
#: A file of a universal checkpoint of DeepSpeed: the fp32 values or one kind of state of one parameter
#: (deepspeed/checkpoint/ds_to_universal.py).
UNIVERSAL_FILE: Final = re.compile(
    rf"(?:.*/)?zero/[^/]+/(?:fp32|{'|'.join(sorted(frozenset().union(*(row.known_state for row in TABLE))))})\.pt"
)
#: What a rank of model parallelism saves: a file of DeepSpeed, or a folder of Megatron.
MODEL_PARALLEL_FILE: Final = re.compile(r"(?:.*/)?(mp_rank_\d+(?:_\d+)*)(?:_model_states\.pt|/[^/]*)")
#: Index of a model in several files: the file of each tensor (transformers).
INDEX_FILE: Final = re.compile(r".*\.(bin|safetensors)\.index\.json")
#: One of these files.
SHARD_FILE: Final = re.compile(r".*-\d{5}-of-\d{5}\.(bin|safetensors)")
