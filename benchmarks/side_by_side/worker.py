"""One rank of one system: builds it, then does as many steps as each line on stdin asks for.

Answers are lines of JSON on the stdout it was started with; whatever libraries print goes to stderr.
"""

import json
import os
import sys
from pathlib import Path


def main() -> None:
    spec = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: object) -> None:
        print(json.dumps(values), file=answers, flush=True)

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from side_by_side import fivefold_of, peers_of
    from side_by_side.sizes import Size

    size = Size(**spec["size"])
    try:
        if spec["maker"] == "fivefold":
            step = fivefold_of.make(
                size, spec["options"], spec["replicas"], spec["micro_batches"], spec["machine"]
            )
        else:
            step = peers_of.make(spec["maker"], size, spec["options"], spec["micro_batches"], spec["machine"])
        step()
    except Exception as error:
        answer(refused=" ".join(f"{type(error).__name__}: {error}".split())[:300])
        raise
    answer(ready=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            step()
        answer(peak_bytes=_peak_bytes())


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main()
