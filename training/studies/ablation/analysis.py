"""Analysis of a study: results from the `jakiro bench` documents of all seeds."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from inference.benchmark.document import ComparisonDocument
from inference.benchmark.method_names import AUTOREGRESSIVE
from inference.benchmark.samples import SPEED, TAU, rate_of
from inference.benchmark.stats import Rate, Ratio, ratio
from training.studies.ablation.arms import BASE, Arm
from training.studies.ablation.contrasts import find_cells, two_by_two
from training.studies.ablation.results import ArmExperts, ArmRow, ArmVerdict, StudyResults

_Rates = Mapping[str, Rate]  # of each method, over all seeds and prompts


def analyse(documents: Mapping[int, ComparisonDocument], arms: Sequence[Arm]) -> StudyResults:
    """Return the results of a study."""
    methods = next(iter(documents.values())).methods
    prompts = sorted({sample.prompt for sample in methods[0].samples})
    cells = find_cells({arm.name: arm.settings for arm in arms})
    rows, interactions = [], []
    for temperature in dict.fromkeys(method.temperature for method in methods):
        samples = {
            name: [each.figures(name, temperature).samples for each in documents.values()]
            for name in (AUTOREGRESSIVE, *(arm.name for arm in arms))
        }
        taus = {name: rate_of(several, TAU, prompts) for name, several in samples.items()}
        speeds = {name: rate_of(several, SPEED, prompts) for name, several in samples.items()}
        rows += [_row(arm, temperature, documents, taus, speeds) for arm in arms]
        if cells is not None:
            interactions.append(two_by_two(cells, temperature, taus))
    return StudyResults(
        seeds=len(documents),
        prompts=len(prompts),
        note=_note(len(documents), len(prompts), rows),
        rows=tuple(rows),
        interactions=tuple(interactions),
        experts=tuple(filter(None, map(_diversity, arms))),
    )


def _row(
    arm: Arm,
    temperature: float,
    documents: Mapping[int, ComparisonDocument],
    taus: _Rates,
    speeds: _Rates,
) -> ArmRow:
    """Return the results of an arm at a temperature."""
    figures = [each.figures(arm.name, temperature) for each in documents.values()]
    rates = [one.conditional_acceptance_rate for one in figures]
    depths = range(max(map(len, rates)))  # not all seeds reach the same depth
    forwards = sum(one.target_forwards for one in figures)
    tau_ratio = ratio(taus[arm.name], taus[BASE])
    agreement = [
        float(one["validation"]["levels"][0]["agreement"])
        for one in arm.evaluations
        if "validation" in one
    ]
    return ArmRow(
        arm=arm.name,
        temperature=temperature,
        parameters=arm.parameters,
        intermediate_size=arm.width,
        training_tokens=tuple(int(record["training"]["tokens"]) for record in arm.records),
        validation_agreement=fmean(agreement) if agreement else None,
        tau=taus[arm.name].pooled,
        tau_ratio=tau_ratio,
        conditional_acceptance_rate=tuple(
            fmean(one[depth] for one in rates if len(one) > depth) for depth in depths
        ),
        tokens_per_second=speeds[arm.name].pooled,
        seconds_per_draft=sum(one.seconds.draft for one in figures) / max(forwards, 1),
        speed_ratio=ratio(speeds[arm.name], speeds[BASE]),
        speedup=ratio(speeds[arm.name], speeds[AUTOREGRESSIVE]),
        verdict=_verdict(arm.name, tau_ratio),
    )


def _diversity(arm: Arm) -> ArmExperts | None:
    """Return the diversity of an arm's experts; None if it was not measured."""
    names = ("top_overlap", "router_entropy", "load_entropy")
    measured = [one["experts"] for one in arm.evaluations if "experts" in one]
    if not measured:
        return None
    by_seed = [tuple(seed[name] for name in names) for seed in measured]
    overlaps, router, load = zip(*by_seed, strict=True)
    return ArmExperts(
        arm=arm.name,
        top_overlap=None if None in overlaps else fmean(overlaps),
        router_entropy=fmean(router),
        load_entropy=fmean(load),
        by_seed=tuple(by_seed),
    )


def _verdict(arm: str, tau_ratio: Ratio) -> ArmVerdict:
    if arm == BASE:
        return "base"
    if not tau_ratio.is_resolved:
        return "not resolved"
    return "better" if tau_ratio.value > 1 else "worse"


def _note(num_seeds: int, num_prompts: int, rows: Sequence[ArmRow]) -> str:
    if all(row.tau == 1 for row in rows):
        return "No arm accepted a draft, so this study says nothing; train longer."
    if num_seeds < 2:
        return (
            "With one seed, the 95% intervals cover the spread over prompts, not over trainings; "
            "another seed may reverse any verdict."
        )
    # With two seeds, the spread over seeds is estimated poorly.
    rate = "one in ten" if num_seeds == 2 else "one in twenty"
    num_verdicts = sum(row.verdict != "base" for row in rows)
    return (
        f"The 95% intervals over {num_seeds} seeds and {num_prompts} prompts are paired. Even if "
        f"no arm differed from the base, about {rate} of the {num_verdicts} verdicts on tau would "
        "be 'better' or 'worse'."
    )
