"""bench/programs/wrong_sums.py with random programs: wrong sums over a stock allocator, none over ours.

    python -m torch.distributed.run --nproc-per-node N python/tests/gpu/ranks_wrong_sums.py \
        [PROGRAMS [--seconds S] [--json FILE]]

1,000 programs, if nothing else is said: a few minutes on 2 to 4 GPUs.
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    programs = sys.argv[1] if len(sys.argv) > 1 else "1000"
    program = Path(__file__).parents[3] / "bench/programs/wrong_sums.py"
    sys.argv = [str(program), "--programs", programs, *sys.argv[2:]]
    runpy.run_path(str(program), run_name="__main__")
