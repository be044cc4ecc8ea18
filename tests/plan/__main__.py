"""`python -m tests.plan [STATES] [WORD]`: explore all configurations, or those whose name contains WORD, up to STATES states each."""

from __future__ import annotations

import sys

from tests.plan.appending import Mode
from tests.plan.configs import CONFIGS, LOST_ANSWERS
from tests.plan.explorer import explore


def main(limit: int = 20_000, word: str = "") -> int:
    failures = 0
    for configs, Mode.lost_answers in ((CONFIGS, False), (LOST_ANSWERS, True)):
        for name, config in configs.items():
            if word not in name:
                continue
            result = explore(*config(), limit=limit)
            print(f"{name}: {result.states} states, {'all of them' if result.complete else 'cut off'}", flush=True)
            failures += len(result.found)
            for text, steps in result.found.items():
                print("  VIOLATION", text, *steps, sep="\n    ")
    return 1 if failures else 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(main(int(arguments[0]) if arguments else 20_000, arguments[1] if len(arguments) > 1 else ""))
