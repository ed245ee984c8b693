"""The table of what each kind of model can do: made by doing it, and what is refused is refused in a sentence."""

import pytest

from model_families import COLUMNS, shown, table
from model_kinds import kinds
from tiny_models import needs

pytestmark = pytest.mark.filterwarnings("ignore")
# Kinds that are served in all columns but these, in transformers 5.23.
MOST_REFUSED = {"experts": 0, "LoRA": 0, "streamed": 2, "quantised": 2, "captured decoding": 4, "captured training": 3}


def test_a_table_says_yes_or_why_not():
    found = table([needs("qwen3_next"), needs("deepseek_v4")])
    assert set(found["qwen3_next"].values()) == {"yes"}
    cells = found["deepseek_v4"]
    assert cells["captured decoding"].startswith("transformers makes no static cache for it")
    cells["captured decoding"] = "no static cache"
    assert set(cells.values()) == {"yes", "no static cache"}
    lines = shown(found).splitlines()
    assert lines[2:5] == [
        "| qwen3_next | yes | yes | yes | yes | yes | yes |",
        "| deepseek_v4 | yes | yes | yes | yes | (1) | yes |",
        "| **2 kinds** | **2** | **2** | **2** | **2** | **1** | **2** |",
    ]
    assert lines[-1] == "(1) no static cache"


@pytest.mark.thorough
def test_every_kind_is_served_or_refused_with_a_reason():
    found = table(kinds(), print)
    print(shown(found))
    assert not [kind for kind, cells in found.items() if "the numbers differ" in cells.values()]
    refused = {column: [kind for kind in found if found[kind][column] != "yes"] for column in COLUMNS}
    too_many = {column: names for column, names in refused.items() if len(names) > MOST_REFUSED[column]}
    assert not too_many
