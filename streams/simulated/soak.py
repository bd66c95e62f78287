"""Runs random schedules by the thousand: `python -m kvlane.streams.simulated.soak`.

A schedule that fails is run again, alone, with `--only` and the seed that is printed with it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

from kvlane.streams.simulated.draw import draw
from kvlane.streams.simulated.schedules import run_schedule
from kvlane.streams.simulated.threads import HostThreads

_CHUNK = 200


@dataclass(frozen=True, slots=True)
class SoakFailure:
    """A schedule in which something does not hold."""

    seed: int
    error: str

    def __str__(self) -> str:
        return f"{self.error}\n{draw(self.seed)}\nrun it again: {replay_command(self.seed)}"


def replay_command(seed: int) -> str:
    return f"python -m kvlane.streams.simulated.soak --only {seed}"


def run_seeds(seeds: Sequence[int]) -> tuple[Counter[str], SoakFailure | None]:
    """Run these schedules one after another, up to the first that fails; what was seen, and that failure."""
    seen: Counter[str] = Counter()
    with HostThreads() as threads:
        for seed in seeds:
            try:
                seen += run_schedule(draw(seed), threads)
            except Exception as error:  # noqa: BLE001  whatever it is, it is this schedule's
                return seen, SoakFailure(seed, f"{type(error).__name__}: {error}")
            seen["schedules"] += 1
    return seen, None


def soak(first_seed: int, schedules: int, workers: int) -> tuple[Counter[str], SoakFailure | None]:
    """The same over several processes; the rest is dropped once one has failed."""
    seeds = range(first_seed, first_seed + schedules)
    chunks = [seeds[at : at + _CHUNK] for at in range(0, schedules, _CHUNK)]
    seen: Counter[str] = Counter()
    # Spawned: a fork would copy the locks of threads that are not there any more.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run_seeds, chunk) for chunk in chunks]):
            found, failure = done.result()
            seen += found
            if failure is not None:
                pool.shutdown(cancel_futures=True)
                return seen, failure
    return seen, None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument(
        "--seed", type=int, help="of the first schedule; the others follow it (default: random)"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--only", type=int, metavar="SEED", help="run this schedule alone, and let its error through"
    )
    options = parser.parse_args(arguments)
    if options.only is not None:
        schedule = draw(options.only)
        print(schedule)
        with HostThreads() as threads:
            print(dict(run_schedule(schedule, threads)))
        return 0
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"{options.schedules} schedules from seed {seed} on", flush=True)
    began = time.monotonic()
    seen, failure = soak(seed, options.schedules, options.workers)
    print(
        f"{seen['schedules']} schedules held in {time.monotonic() - began:.0f} s: {dict(sorted(seen.items()))}"
    )
    if failure is not None:
        print(f"seed {failure.seed} FAILED: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
