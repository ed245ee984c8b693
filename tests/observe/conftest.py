from pathlib import Path

import pytest
from recorded_runs import write_run


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "small-moe")
