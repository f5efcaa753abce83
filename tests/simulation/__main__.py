"""`python -m tests.simulation`: run many schedules on all cores, or one again.

    python -m tests.simulation --count 50000          # as `make sim` does
    python -m tests.simulation --seed 1234 -v         # replay one, with every log line and its virtual time
    python -m tests.simulation --seed 1234 --shrink   # and leave out what it fails without

Exits with 1 when a schedule failed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, MutableMapping
from dataclasses import fields
from multiprocessing import get_context
from typing import Any

import structlog

from tests.simulation.play import Failure, discard, play_all, play_seeds
from tests.simulation.schedule import Schedule, draw_schedule
from tests.simulation.shrink import shrink
from tests.simulation.virtual_loop import VirtualLoop
from tests.simulation.world import World, summary

BATCH = 200
"""Seeds that a process takes at a time."""
FAILURES_SHOWN = 10

Result = tuple[int, list[Counter[str]], list[tuple[int, str]]]
"""How many schedules were run, what happened in those that held, and the seeds and reasons of those that did not."""


def main() -> int:
    """Run what is asked for; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="run this schedule only")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="with --seed: print the schedule and what is logged"
    )
    parser.add_argument("--shrink", action="store_true", help="with --seed: find a smaller schedule that fails")
    parser.add_argument("--count", type=int, default=2_000, help="how many schedules (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    options = parser.parse_args()
    if options.seed is not None:
        return run_one(draw_schedule(options.seed), verbose=options.verbose, shrinks=options.shrink)
    return run_many(range(options.first, options.first + options.count), jobs=options.jobs)


def run_one(schedule: Schedule, *, verbose: bool, shrinks: bool) -> int:
    """Play one schedule, and say what came of it."""
    be_quiet()
    if shrinks:
        schedule = shrink(schedule).schedule
    if verbose or shrinks:
        print(described(schedule))
    if verbose:
        return _run_aloud(schedule)
    (result,) = play_all([schedule])
    if isinstance(result, Failure):
        traceback.print_exception(result.error)
        return 1
    print(f"seed {schedule.seed} holds")
    return 0


def _run_aloud(schedule: Schedule) -> int:
    loop, world = VirtualLoop(), World(schedule)

    def write(_logger: object, _method: str, event: MutableMapping[str, Any]) -> str:
        name = event.pop("event")
        values = " ".join(f"{key}={value}" for key, value in event.items())
        return f"{world.clock.monotonic() - world.began_at:9.3f} s  {name} {values}"

    structlog.configure(processors=[write], wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG))
    loop.on_idle = world.on_idle
    try:
        loop.run_until_complete(world.play())
    except Exception:  # noqa: BLE001 - it is what the caller came to see
        traceback.print_exc()
        return 1
    finally:
        discard(loop)
    print(f"seed {schedule.seed} holds: {dict(world.ends)}")
    return 0


def described(schedule: Schedule) -> str:
    """Each of its parts on a line."""
    lines = []
    for field in fields(schedule):
        value = getattr(schedule, field.name)
        parts = value if isinstance(value, tuple) else (value,)
        lines += [f"{field.name}: {part}" for part in parts]
    return "\n".join(lines)


def run_many(seeds: range, *, jobs: int) -> int:
    """Play all these schedules, show how it goes, and say what came of it."""
    began_at = time.monotonic()
    tallies: list[Counter[str]] = []
    failures: list[tuple[int, str]] = []
    done = 0
    for count, some, failed in _results(seeds, jobs):
        done += count
        tallies += some
        failures += failed
        rate = done / (time.monotonic() - began_at)
        print(f"{done} of {len(seeds)} schedules, {rate:.0f} a second, {len(failures)} failed", flush=True)
        for seed, reason in failed:
            print(f"seed {seed}: {reason}\n  again: python -m tests.simulation --seed {seed} -v", flush=True)
        if len(failures) >= FAILURES_SHOWN:
            print("too many have failed: the rest is not run")
            break
    for name, times in sorted(summary(tallies).items()):
        print(f"{times:10d}  {name}")
    return int(bool(failures))


def _results(seeds: range, jobs: int) -> Iterator[Result]:
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    with get_context("fork" if sys.platform == "linux" else "spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(run_batch, batches)


def run_batch(seeds: range) -> Result:
    """Play some schedules in this process."""
    be_quiet()
    tallies, failures = [], []
    for seed, result in zip(seeds, play_seeds(seeds), strict=True):
        if isinstance(result, Failure):
            failures.append((seed, result.reason))
        else:
            tallies.append(result)
    return len(seeds), tallies, failures


def be_quiet() -> None:
    """Thousands of faults are logged otherwise."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


if __name__ == "__main__":
    sys.exit(main())
