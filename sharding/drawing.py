"""A mesh as a small drawing: which device stands where on its axes."""

import itertools

import jax


def draw_mesh(mesh: jax.sharding.Mesh) -> list[str]:
    """Lines. The innermost axis of more than one device runs to the right, the others down.

        data           tensor 0      1      2      3
        0                     cpu:0  cpu:1  cpu:2  cpu:3
        1                     cpu:4  cpu:5  cpu:6  cpu:7
    """
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1] or [mesh.axis_names[-1]]
    grid = mesh.devices.reshape([mesh.shape[axis] for axis in axes])
    down, right = axes[:-1], axes[-1]
    names = [f"{device.platform}:{device.id}" for device in grid.reshape(-1)]
    width, columns = max(map(len, names)), mesh.shape[right]
    label = [max(len(axis), 3) for axis in down]

    def line(places: tuple[object, ...], name: str, cells: list[str]) -> str:
        left = "  ".join(str(place).ljust(size) for place, size in zip(places, label, strict=True))
        gap = "  " if down else ""
        return f"{left}{gap}{name.ljust(len(right))}  {'  '.join(cell.ljust(width) for cell in cells)}".rstrip()

    lines = [line(tuple(down), right, [str(i) for i in range(columns)])]
    for row, places in enumerate(itertools.product(*(range(mesh.shape[axis]) for axis in down))):
        lines.append(line(places, "", names[row * columns : (row + 1) * columns]))
    return lines
