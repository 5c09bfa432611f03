"""Entry of the zygote process: run by path with `python -I -S`, so that no site code and no environment count."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from orchard.env.runtimes.local.zygote import main

if __name__ == "__main__":
    main()
