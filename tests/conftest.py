import os
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton
sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)  # tests run in parallel, one process a core


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """Engines of tiny pairs, built once per session and asked for by their options."""
    from builder import Pairs

    return Pairs(tmp_path_factory.mktemp("pairs"))
