"""What a sweep found, in words and as a table."""

from training.ablation.markdown import markdown_head, markdown_line
from training.ablation.results import ArmSweep, SweepResults
from training.ablation.sweep import value_name


def sweep_in_words(sweep: SweepResults) -> str:
    """Return which value every arm was trained with."""
    chosen = ", ".join(f"{one.arm} {value_name(one.chosen)}" for one in sweep.arms)
    return f"{sweep.key}, chosen for each arm on {sweep.prompts} dev prompts: {chosen}."


def sweep_to_markdown(sweep: SweepResults) -> list[str]:
    """Return the lines of a table: tau on dev prompts, that of the chosen value in bold."""
    names = ["arm", "T", *(f"{value_name(value)}" for value in sweep.values)]
    lines = [f"Tau on dev prompts with each value of {sweep.key}, seed {sweep.seed}:", ""]
    lines += markdown_head(names, ("arm",))
    for one in sweep.arms:
        for temperature, taus in zip(sweep.temperatures, one.tau, strict=True):
            cells = [one.arm, f"{temperature:g}", *_cells(sweep, one, taus)]
            lines.append(markdown_line(cells))
    return [*lines, ""]


def _cells(sweep: SweepResults, one: ArmSweep, taus: tuple[float, ...]) -> list[str]:
    pairs = zip(sweep.values, taus, strict=True)
    return [f"**{tau:.2f}**" if value == one.chosen else f"{tau:.2f}" for value, tau in pairs]
