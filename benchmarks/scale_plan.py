"""A search with 1,000 workers and 100,000 trials: `python benchmarks/scale_plan.py [--trials 100000] [--trial-s 600]`.

`tests/support/search_simulation.py` simulates it with the measured costs of benchmarks/results/scale_costs.json. The
cost of an operation in each place is a constant, a part for each finished trial and a part for each running trial; a
least-squares fit gives these values, none of them negative. Workers use the database directly, or through proxies. The
last simulations change one property of the search with 1,000 workers, to show what the limit depends on. Prints JSON,
and writes benchmarks/results/scale_plan.json.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import repository

from search_simulation import Costs, Plan, fitted, simulate

RESULTS = repository.RESULTS / "scale_plan.json"
COSTS = repository.RESULTS / "scale_costs.json"


def without(costs: Costs, part: str) -> Costs:
    """Return costs in which no operation but `join` depends on the finished or on the running trials."""
    return {
        name: places if name == "join" else {place: replace(cost, **{part: 0.0}) for place, cost in places.items()}
        for name, places in costs.items()
    }


def at_most(plan: Plan) -> dict[str, Any]:
    """Simulate a plan for at most three times the time that it takes if workers never wait."""
    return simulate(replace(plan, days=3 * plan.trials * plan.trial_s / plan.workers / 86_400))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100_000)
    parser.add_argument("--trial-s", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    measured = json.loads(COSTS.read_text())
    rows = {name: [row for row in measured["storage"] if row["storage"] == name] for name in ("postgresql", "proxy")}
    direct, proxied = fitted(rows["postgresql"]), fitted(rows["proxy"])
    sampler = [(row["finished"], row["CPU s"]) for row in measured["sampler"]]
    base = Plan(direct, 0, options.trials, options.trial_s, sampler=sampler, lost_per_hour=0.01, seed=options.seed)
    results: dict[str, Any] = {
        "assumptions": {
            "seconds of a trial": base.trial_s,
            "deaths of a worker per hour": base.lost_per_hour,
            "connections of the database": base.connections,
            "processors of the database": base.processors,
        },
        "costs, CPU s: constant, for each finished and for each running trial": {
            name: {
                f"{operation}, {place}": [
                    float(f"{value:.3g}") for value in (cost.constant, cost.finished, cost.running)
                ]
                for operation, places in costs.items()
                for place, cost in places.items()
            }
            for name, costs in (("directly", direct), ("through a proxy", proxied))
        },
        "a choice, CPU s": {str(count): round(base.choice_s(count), 2) for count in (100, 1000, 10_000, 100_000)},
    }
    sizes = (10, 30, 100, 300, 1000)
    results["direct"] = [at_most(replace(base, workers=workers)) for workers in sizes]
    through = replace(base, costs=proxied)
    results["one proxy"] = [at_most(replace(through, workers=workers, proxies=1)) for workers in sizes]
    results["a proxy for 100 workers"] = [
        at_most(replace(through, workers=workers, proxies=workers // 100)) for workers in (300, 1000)
    ]
    large = replace(through, workers=1000, proxies=10)
    results["1,000 workers, changed"] = {
        "choices that take no time": at_most(replace(large, sampler=())),
        "30 proxies": at_most(replace(large, proxies=30)),
        "a database with 16 processors": at_most(replace(large, processors=16)),
        "nothing read again for each running trial": at_most(replace(large, costs=without(proxied, "running"))),
        "nothing done again for each finished trial": at_most(replace(large, costs=without(proxied, "finished"))),
        "trials of an hour": at_most(replace(large, trial_s=3600.0)),
        "every worker dies once an hour": at_most(replace(large, lost_per_hour=1.0)),
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
