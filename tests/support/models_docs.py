"""docs/models.md: which architectures are served, from a parity run of each. `make models` writes it.

Run as a module, it takes minutes, and says on standard error how far it is.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import structlog
import torch
import transformers
from transformers.utils import logging

from tests.support.architectures import causal_model_types
from tests.support.parity_case import judge

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
QUIET = 50
"""Above all that a load logs."""
HEADER = "| `model_type` | caches | rewind | cuts refused | verdict |"


def render(lines: Iterable[str]) -> str:
    """The page, from the lines of its table."""
    rows = list(lines)
    table = "\n".join(rows)
    refused, alone, stateless = (
        [row for row in rows if words in row]
        for words in ("| refused: ", "served by one node alone", "without a cache")
    )
    return f"""# Models

Every causal language model of transformers {transformers.__version__}, {len(rows)} model types. Of each that is served,
a tiny one with random weights was built from its config, cut in three and into as many nodes as it allows, and compared
in float32 with the whole in transformers: a prefill and thirteen decode steps, across the edge of sliding windows, then
six more with other tokens from four positions before. No logit differed by more than 10⁻⁴. `make models` writes this
page; the tests fail when it is not what they find.

{len(rows) - len(refused)} are served, {len(alone)} of them by one node alone, {len(stateless)} without a cache: every
step then computes all positions again. {len(refused)} are refused, with the reason given here, before a node reads any
weight.

- *caches*: `full` keeps every position, `window` those of a sliding window or chunk, `indexed` every position and what
  an indexer needs, `linear state` the same few numbers however long the text; others are named as in transformers.
- *rewind*: how many positions a session's cache can drop to go on from there. *some nodes* can: those with attention
  alone, while a recurrent or compressed state has no way back, and is rebuilt.
- *cuts refused*: in the tiny model of six layers, the layers that no node may begin with, and why. `GET /mesh` gives
  them for the real one, as `refused_cuts`. Empty: it can be cut anywhere.
- Of models that also see or hear, the text part is served; images and sound are refused. That holds too for those with
  images that have no text class in transformers, such as Qwen2.5-VL and Qwen3-VL, which are not in this table.
- A model that transformers does not know is served by the code that it brings, if its nodes are started with
  `--trust-remote-code`; otherwise it is refused before that code or any weight is read. The code must be the same on
  all nodes: a fingerprint is of weights and config.

{HEADER}
|---|---|---|---|---|
{table}
"""


def documented_lines() -> dict[str, str]:
    """Model type → its line of the page."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return {line.split("`")[1]: line for line in lines[lines.index(HEADER) + 2 :]}


def documented_release() -> str:
    """The release of transformers that the page is about."""
    return PAGE.read_text(encoding="utf-8").partition("model of transformers ")[2].partition(",")[0]


def main() -> None:
    """Print the page."""
    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(QUIET))
    lines: list[str] = []
    for model_type in causal_model_types():
        with tempfile.TemporaryDirectory() as folder:
            lines.append(judge(model_type, Path(folder)).as_line())
        sys.stderr.write(f"{lines[-1]}\n")
    sys.stdout.write(render(lines))


if __name__ == "__main__":
    main()
