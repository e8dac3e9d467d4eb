"""The table of docs/parallelism.md: families x ways to divide them. `python -m scripts.aot.table` prints it."""

from scripts.aot.families import FAMILIES, WAYS, mesh_of, refused


def parallelism_table() -> str:
    """A mesh means: greedy tokens equal those of one device there (`tests/parallelism`), and the serving step compiles
    there for v5e, v6e, v7x and H200 (`scripts.aot_check --families`)."""
    lines = ["| family | " + " | ".join(WAYS) + " |", "|---" * (len(WAYS) + 1) + "|"]
    for family in FAMILIES:
        cells = []
        for way in WAYS.values():
            why = refused(family, way)
            cells.append(mesh_of(family, way) if why is None else f"refused: {why}")
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(parallelism_table(), end="")
