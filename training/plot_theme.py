"""How pictures of runs and studies look."""

INK, LINE = "#1f2937", "#d1d5db"

THEME = {
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,  # a name with dollars is no formula
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "grid.color": "#eceff3",
    "xtick.color": LINE,
    "xtick.labelcolor": INK,
    "ytick.left": False,
    "ytick.labelcolor": INK,
}
